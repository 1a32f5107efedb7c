"""Comparison of several systems under one load.

In a process of ``banaserve bench compare``. Entry: ``command.main``.
"""
