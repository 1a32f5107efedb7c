"""Simulated cluster: cells of instances, their moves, and what happens to them.

In ``banaserve simulate`` and in forecasts of the elastic policy. Entry: ``cell.Cell``.
"""
