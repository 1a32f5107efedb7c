"""Methods that banaserve adds to vLLM's worker, called between engine steps.

vLLM imports this module in the process of every worker; the import also changes its model runners.
"""

from __future__ import annotations

import atexit
import gc

from banaserve.base.errors import UserError
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import implements
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.kv_connector import get_kv_transfer_group, has_kv_transfer_group
from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.runner.model import unname_shared_memory
from banaserve.engine.connector.block_hash import describe_adapter
from banaserve.engine.runner_setup import prepare_runners
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.migration.host.install import install_worker
from banaserve.migration.host.worker_rpc import MigrationMethods


def _prepare(config: VllmConfig) -> None:
    atexit.register(gc.freeze)  # or a garbage collection at the process's end takes seconds
    install_worker(config, prepare_runners(config))


runner_hooks.around_runners(_prepare, unname_shared_memory)


class WorkerExtension(MigrationMethods):
    """Mixin for vLLM's worker, set by ``worker_extension_cls``."""

    @implements(WorkerApi.banaserve_fingerprint)
    def banaserve_fingerprint(self) -> Fingerprint | None:
        if not has_kv_transfer_group():
            return None
        found: Fingerprint = get_kv_transfer_group().fingerprint
        return found

    @implements(WorkerApi.banaserve_describe_adapter)
    def banaserve_describe_adapter(self, path: str) -> str:
        try:
            return describe_adapter(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from error
