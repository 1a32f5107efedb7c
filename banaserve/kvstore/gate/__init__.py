"""Cost gate: how many blocks of a prefix to fetch instead of computing them. Pure.

In engine cores. Entry: ``cost_gate.CostGate``.
"""
