"""Prefix trees of what replicas hold in their caches, and their exchange between balancers."""
