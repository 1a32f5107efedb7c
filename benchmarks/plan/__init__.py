"""The judge of ``banaserve plan``: its rule on real GPUs' split and aggregated runs.

A process of its own. Entry: ``command.main``.
"""
