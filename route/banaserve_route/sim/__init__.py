"""Simulation of regions: clients, balancers and replicas in virtual time.

Entry: ``world``.
"""
