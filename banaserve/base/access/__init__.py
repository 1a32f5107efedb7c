"""API keys in files, tenants, their quotas and cache salts.

In the server's and the balancer's process. Entry: ``tenants.read_tenants``.
"""
