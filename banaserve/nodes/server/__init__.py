"""Server's side of nodes: the pool of nodes that it has taken, and the launcher of engines there.

In the server's process, but ``shim``, a process that stands for one on a node. Entry:
``launcher.NodesLauncher``.
"""
