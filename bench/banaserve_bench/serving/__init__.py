"""``banaserve bench serving``: one server under one load.

Entry: ``command.main``.
"""
