"""Instances: engines with their clients, kept alive; in the server's process.

Entry: ``cluster.Cluster``.
"""
