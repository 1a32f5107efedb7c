"""Policies of moves and roles; ``repaired.Repaired`` is the default.

Entries: ``registry``, ``interface``.
"""
