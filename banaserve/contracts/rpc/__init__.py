"""Contracts of the front door with engine cores and workers over vLLM's utility calls.

Entry: ``engine_api.CoreApi``.
"""
