"""Prefix trees of what replicas hold in their caches, and their exchange between balancers.

In balancers and simulations. Entries: ``tree.make_tree``, ``peers.PeerPrefixes``.
"""
