"""Processes, memory and processor features: Linux and the machine. In every process.

Entry: ``processes.die_with_parent``.
"""
