"""Client of a host's store: connection, calls of instances, requests of an operator.

In engine cores, workers and the server's process. Entry: ``client.StoreClient``.
"""
