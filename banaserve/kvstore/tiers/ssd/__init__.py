"""SSD tier: a log of segments on disk, with recovery, cleaning and checks. In the store's process.

Entry: ``tier``.
"""
