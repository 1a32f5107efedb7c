"""Blocks that are pushed between the stores of two machines while a client writes them.

In the store's process. Entries: ``pushing.Pushing`` sends, ``receiving.Receiving`` receives.
"""
