"""SSD tier: a file per block on disk, with recovery and checks. In the store's process.

Entry: ``tier``.
"""
