"""Modules of a model in place of those that moved: proxies, splits, partial models.

In workers and guests. Entry: ``layer_proxy.RangeProxy``.
"""
