"""vLLM's interface for KV connectors, and the access to a worker's connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed import kv_transfer
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.outputs import KVConnectorOutput

__all__ = [
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "get_tensor_model_parallel_rank",
    "has_kv_transfer_group",
]


def get_kv_transfer_group() -> Any:
    """Return this worker's connector: banaserve's, which has more methods than vLLM's interface."""
    return kv_transfer.get_kv_transfer_group()


class ConnectorBase(KVConnectorBase_V1):
    """vLLM's base class with public names for the attributes that connectors read."""

    @property
    def kv_cache_config(self) -> Any:
        """Layout of the KV cache."""
        return self._kv_cache_config

    @property
    def step_metadata(self) -> Any:
        """Metadata that the scheduler's side has sent for the step under way."""
        return self._get_connector_metadata()
