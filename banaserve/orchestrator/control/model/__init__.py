"""Estimates that decisions are based on: serving times, moves, hand-overs, lengths of outputs.

In the server's process and in simulations. Entry: ``serving_times``.
"""
