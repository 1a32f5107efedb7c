"""vLLM's plug-in point for KV connectors, and the group in which a worker has its connector."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.outputs import KVConnectorOutput

__all__ = [
    "ConnectorBase",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "get_kv_transfer_group",
    "get_tensor_model_parallel_rank",
    "has_kv_transfer_group",
]


class ConnectorBase(KVConnectorBase_V1):
    """vLLM's base class with public names for what connectors read of it."""

    @property
    def layer_names(self) -> list[str]:
        """Names of the attentions of the first KV cache group, in the order of the layers."""
        names: list[str] = self._kv_cache_config.kv_cache_groups[0].layer_names
        return names

    @property
    def step_metadata(self) -> Any:
        """What the scheduler's side has sent for the step under way."""
        return self._get_connector_metadata()
