"""Load of a simulation: requests drawn from a seed, or read from traces and files of lengths.

In ``banaserve simulate`` and in forecasts of the elastic policy. Entry: ``workload.drawn``.
"""
