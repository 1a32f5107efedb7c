"""vLLM's KV connector over the store.

In engine cores (scheduler's side) and workers (worker's side). Entries:
``connector.StoreConnector``, ``prefix_matcher.PrefixMatcher.match`` in the scheduler,
``worker.StoreConnectorWorker`` in the worker.
"""
