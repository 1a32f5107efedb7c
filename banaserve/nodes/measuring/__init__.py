"""Measurements of a cluster's links and nodes, for ``banaserve doctor`` and a server's start."""
