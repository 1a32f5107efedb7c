"""Policies that pick the instances of a request's legs.

In the server's process and in simulations. Entries: ``registry.make``, ``interface``.
"""
