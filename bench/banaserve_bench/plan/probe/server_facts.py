"""Metrics of a server that a probe needs: load, KV memory, number of engines."""

from __future__ import annotations

import http.client
from typing import NamedTuple

from banaserve_bench.loadgen.metrics_page import fetch, samples_of

_TIMEOUT_S = 10.0
_BUSY = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)
_CACHE = "vllm:cache_config_info"
_READY = "banaserve_instance_ready"


class ServerMetrics(NamedTuple):
    """Metrics of a server; None where it does not give them.

    Attributes:
        num_requests: Number of requests that run or wait.
        kv_tokens: Capacity of an engine's KV cache in tokens.
        block_tokens: Number of tokens of a KV block.
        num_engines: Number of engines behind the API.
    """

    num_requests: int | None = None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    num_engines: int | None = None


def read_metrics(url: str, api_key: str | None) -> ServerMetrics:
    """Return the metrics of the server at ``url``; without a page of metrics, none. Blocking."""
    try:
        return metrics_of(fetch(f"{url}/metrics", api_key, _TIMEOUT_S))
    except (OSError, http.client.HTTPException):
        return ServerMetrics()


def metrics_of(page: str) -> ServerMetrics:
    """Return the metrics of a page in Prometheus' text format; none of any other page."""
    try:
        samples = samples_of(page, *_BUSY, _CACHE, _READY)
        busy = [int(one.value) for one in samples if one.name in _BUSY]
        caches = [one.labels for one in samples if one.name == _CACHE]
        ready = [one for one in samples if one.name == _READY]
        block = [int(one["block_size"]) for one in caches]
        tokens = [int(one["num_gpu_blocks"]) * int(one["block_size"]) for one in caches]
    except (ValueError, KeyError, OverflowError):
        return ServerMetrics()
    return ServerMetrics(
        sum(busy) if busy else None,
        min(tokens, default=0) or None,
        min(block, default=0) or None,
        len(ready or caches) or None,
    )
