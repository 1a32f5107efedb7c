"""Requests of benchmarks: datasets and traces from files, and synthetic ones.

Entry: ``registry``.
"""
