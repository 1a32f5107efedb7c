"""Life of a server behind its HTTP: instances, requests, operations. In the server's process.

Entries: ``client.DisaggregatedClient.generate`` for a request, ``instances.cluster.Cluster`` for
the instances, ``operation_base.Operations`` for what takes a while.
"""
