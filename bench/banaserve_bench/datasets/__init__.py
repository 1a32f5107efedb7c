"""Requests of benchmarks: datasets and traces from files, and synthetic ones.

In a process of ``banaserve bench``. Entry: ``items.Dataset``.
"""
