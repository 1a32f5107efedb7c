"""Methods that banaserve adds to vLLM's worker; called between engine steps."""

from __future__ import annotations

from typing import Any

import msgspec

from banaserve.engine.vllm.compat.kv_connector import get_kv_transfer_group, has_kv_transfer_group
from banaserve.engine.vllm.migration.host.worker_rpc import MigrationMethods


class WorkerExtension(MigrationMethods):
    """Mixed into the worker by ``worker_extension_cls``."""

    def banaserve_fingerprint(self) -> dict[str, Any] | None:
        """What this worker's KV blocks are, as plain values; None without a store."""
        if not has_kv_transfer_group():
            return None
        return msgspec.structs.asdict(get_kv_transfer_group().fingerprint)
