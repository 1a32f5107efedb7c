"""vLLM's KV connector over the store.

In engine cores (scheduler's side) and workers (worker's side). Entries:
``connector.StoreConnector``, ``scheduler_side.prefix_matcher.PrefixMatcher.match``,
``worker_side.worker.StoreConnectorWorker``.
"""
