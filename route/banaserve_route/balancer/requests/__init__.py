"""A request on its way: as a policy sees it, queued, given a target, and proxied.

In a balancer's process. Entry: ``proxy.ProxiedRequest``.
"""
