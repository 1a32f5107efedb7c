"""Comparison of several systems under one load.

Entry: ``command.main``.
"""
