"""Forecasts: a simulation of recent requests under a candidate, and statistics of the load.

In the process that decides for a server. Entry: ``forecast.forecast``.
"""
