"""Pure policies that pick a server for a request: Preble, SkyWalker, GORGO and simpler ones.

Entries: ``registry``, ``interface``. In balancers and simulations.
"""
