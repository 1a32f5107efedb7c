"""Registries of implementations by name, and entry points by which other packages add theirs.

In every process that has a choice of implementations. Entries: ``registry.Registry``,
``discovery.load_plugins``.
"""
