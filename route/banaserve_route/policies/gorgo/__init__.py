"""GORGO: one cost of round trip, missed tokens and backlog, with weights tuned online.

In a balancer's process. Entry: ``gorgo.Gorgo``; ``gorgo_v1`` and ``tuner`` are the paper's
first version and the tuner exactly as in its code, for comparison.
"""
