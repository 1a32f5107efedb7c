"""Candidates of a decision: arrangements of roles, modules that could leave, steps to get there.

In the server's process and the one that decides for it. Entry: ``arrangement.arrangements``.
"""
