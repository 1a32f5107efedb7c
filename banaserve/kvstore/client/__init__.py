"""Client of a host's store: connection, calls of instances, cost gate, requests of an operator.

In engine cores, workers, guests and the server's process. Entry: ``client.StoreClient``.
"""
