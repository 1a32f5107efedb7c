"""Blocks that replicas really hold in their caches, as their KV cache events say.

In a balancer's process. Entry: ``known_caches.KnownCaches``; the events themselves are read in
``balancer/targets/kv_events/``.
"""
