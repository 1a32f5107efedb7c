"""Contracts of the front door with engine cores and workers over vLLM's utility calls.

In the server's process, engine cores and workers. Entry: ``engine_api.CoreApi``.
"""
