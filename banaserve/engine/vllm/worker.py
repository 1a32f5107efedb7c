"""Methods that banaserve adds to vLLM's worker, called between engine steps."""

from __future__ import annotations

from banaserve.engine.vllm.compat.kv_connector import get_kv_transfer_group, has_kv_transfer_group
from banaserve.engine.vllm.migration.host.worker_rpc import MigrationMethods
from banaserve.engine.vllm.rpc.engine_api import WorkerApi
from banaserve.engine.vllm.rpc.typed_rpc import implements
from banaserve.kvstore.fingerprint import Fingerprint


class WorkerExtension(MigrationMethods):
    """Mixed into the worker by ``worker_extension_cls``."""

    @implements(WorkerApi.banaserve_fingerprint)
    def banaserve_fingerprint(self) -> Fingerprint | None:
        if not has_kv_transfer_group():
            return None
        found: Fingerprint = get_kv_transfer_group().fingerprint
        return found
