"""Global KV cache store: pool and index of a host's blocks, and the client of an instance.

Entries: ``daemon.process.serve`` in the store's process, ``client.client.StoreClient`` in engine
cores, workers, guests and the server, ``tiers.registry.TIERS`` for tiers of other packages.
"""
