"""Engines on other machines: agents, shims, links, placement by Ray.

Entries: ``server.launcher.NodesLauncher`` in the server's process, ``agent.agent.NodeAgent`` in a
node's agent, ``server.shim.main`` in a process of the server's machine that stands for one on a
node.
"""
