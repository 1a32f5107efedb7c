"""Simulated instances: engine, batch and prefix cache, each in virtual time.

In ``banaserve simulate`` and in forecasts of the elastic policy. Entry: ``engine.SimEngine``.
"""
