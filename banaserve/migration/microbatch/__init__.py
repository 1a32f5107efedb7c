"""Micro-batches of a step, so that host and guests compute at the same time. In workers.

Entry: ``pipeline``.
"""
