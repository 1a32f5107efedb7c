"""Commands that talk to a running server, most of them over its admin API.

In a process of each command. Begin at ``instances``; those that only show are in ``views``.
"""
