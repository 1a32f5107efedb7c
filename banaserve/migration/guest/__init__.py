"""Guest: a process that computes units of a host engine with the memory of another instance.

Entry: ``server``.
"""
