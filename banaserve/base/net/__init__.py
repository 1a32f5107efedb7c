"""Client connections (table, descriptors, TLS, stalls of the event loop), and frames of messages.

Connections are in the server's and the balancer's process, frames in all that send each other
messages. Entries: ``connections.ConnectionTable.add``, ``framing.Framing``.
"""
