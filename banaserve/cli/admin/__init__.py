"""Commands that talk to a running server, most of them over its admin API.

In a process of each command. Begin at ``operations``; those that only show begin at ``status``.
"""
