"""``banaserve doctor``: what this machine can run.

In a process of its own. Entry: ``command.doctor``.
"""
