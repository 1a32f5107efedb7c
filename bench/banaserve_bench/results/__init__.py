"""Format of results: one JSON schema for all benchmarks.

In a process of ``banaserve bench``. Entry: ``result.Result``.
"""
