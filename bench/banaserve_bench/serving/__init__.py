"""``banaserve bench serving``: one server under one load.

In a process of its own. Entry: ``command.main``.
"""
