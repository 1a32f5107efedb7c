"""Relays: processes that accept clients and relay bytes, for one balancer that decides.

``processes`` in the balancer's process, ``relay`` in each relay. Entry: ``processes.Relays``.
"""
