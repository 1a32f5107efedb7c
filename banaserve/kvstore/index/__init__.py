"""Index of a pool's blocks: slots, leases, reservations, order of eviction. No I/O.

In the store's process. Entry: ``index.BlockIndex``.
"""
