"""Store tier over Mooncake Store. In the store's process, with Mooncake in a process below it.

Entry: ``tier.MooncakeTier``.
"""
