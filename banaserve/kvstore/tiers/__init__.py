"""Tiers below the pool: SSD, Mooncake, and those of other packages. In the store's process.

Entries: ``registry.TIERS``, ``interface``.
"""
