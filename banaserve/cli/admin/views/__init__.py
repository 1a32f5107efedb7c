"""Commands that show the state of a running server and change nothing.

In a process of each command. Entry: ``status.status``.
"""
