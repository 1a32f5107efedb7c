"""Advice whether to split prefill and decode for a load, from simulations of both.

In ``banaserve plan``. Entry: ``advisor.advise``; ``gain.py`` has the rule of the verdict.
"""
