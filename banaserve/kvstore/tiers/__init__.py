"""Tiers below the pool: SSD, and the registry of those of other packages, such as Mooncake.

In the store's process. Entries: ``registry.TIERS``, ``interface``.
"""
