"""Format of results: one JSON schema for all benchmarks.

Entry: ``result.Result``.
"""
