"""Estimates that decisions are based on: serving times, moves, hand-overs, lengths of outputs.

In the server's process and in simulations; ``learnt_time`` and ``overlapping`` also in engine cores
and workers. Entry: ``serving_times``.
"""
