"""``banaserve plan --confirm``: predictions beside outcomes on engines.

In a process of ``banaserve plan``. Entries: ``confirmation.confirmed``, ``history.read_errors``.
"""
