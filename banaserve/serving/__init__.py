"""Life of a server behind its HTTP: instances, requests, operations. In the server's process.

Entries: ``client.DisaggregatedClient.generate`` for a request, ``cluster.Cluster`` for the
instances, ``operations.Operations`` for what takes a while.
"""
