"""Processes, memory and processor features: Linux and the machine. In every process.

Entries: ``processes.die_with_parent``, ``spawning``.
"""
