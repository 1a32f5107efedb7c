"""Coordinator of live migration: guests, phases of a move, aborts. In the server's process.

Entry: ``coordinator.Coordinator.begin``. What a host and a guest do is in ``banaserve.migration``.
"""
