"""Blocks between the pool and the tiers below it: write-behind, choice and promotion.

In the store's process. Entry: ``tiering.Tiering``.
"""
