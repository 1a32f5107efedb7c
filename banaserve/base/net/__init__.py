"""Client connections: table, descriptors, TLS, stalls of the event loop.

In the server's and the balancer's process. Entry: ``connections.ConnectionTable.add``.
"""
