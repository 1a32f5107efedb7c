"""Server's side of nodes: the pool of nodes that it has taken, and the launcher of engines there.

In the server's process; ``shim`` is a process of its own, which stands for one on a node. Entry:
``launcher.NodesLauncher``.
"""
