"""Policies that pick the instances of a request's legs; ``registry.make`` by name.

Entries: ``registry.make``, ``interface``.
"""
