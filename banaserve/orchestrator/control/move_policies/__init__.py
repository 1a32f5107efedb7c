"""Policies of moves and roles; ``algorithm1.Repaired`` is the default.

In the server's process, and in the simulator. Entries: ``registry``, ``interface``.
"""
