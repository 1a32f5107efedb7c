"""Engines on other machines: agents, shims, links, placement by Ray.

Entries: ``launcher.NodesLauncher`` in the server's process, ``agent`` in a node's agent,
``shim.main`` in a process of the server's machine that stands for one on a node.
"""
