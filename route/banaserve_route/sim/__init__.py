"""Simulation of regions: clients, balancers and replicas in virtual time.

In a process of ``banaserve simulate`` or of a benchmark. Entry: ``world.simulate``.
"""
