"""Targets of requests: replicas and peers, their health, and which of them a balancer has.

In a balancer's process. Entry: ``membership.TargetRegistry``.
"""
