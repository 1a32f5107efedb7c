"""HTTP of a balancer: connections of clients and to replicas, byte for byte.

In a balancer's process. Entries: ``client_connection.ClientConnection``,
``replica_connection.ReplicaConnection``.
"""
