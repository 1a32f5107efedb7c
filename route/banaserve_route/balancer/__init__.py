"""Process of a balancer: HTTP in front of whole servers, one balancer a region.

Entry: ``server.run``.
"""
