"""Blocks between the stores of several machines. In the store's process.

Entry: ``tier.PeersTier``.
"""
