"""Worker side of the connector: copies of each layer between KV cache and store.

In workers. Entry: ``worker.StoreConnectorWorker``.
"""
