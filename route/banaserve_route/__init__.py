"""Balancer of whole servers, its policies, and their simulation over regions.

In a process of ``banaserve route``. Entries: ``balancer.server.run``, ``policies.registry``. No
vLLM, no torch.
"""
