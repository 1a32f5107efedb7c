"""KV connector of vLLM over the global store, layer-wise in both directions, for any role."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from banaserve.base.clock import WallClock
from banaserve.contracts.environment import INSTANCE_VARIABLE, STORE_VARIABLE
from banaserve.contracts.trace_events import EngineAnswer
from banaserve.engine.compat.config import VllmConfig, own_budget
from banaserve.engine.compat.kv_connector import (
    ConnectorBase,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    get_tensor_model_parallel_rank,
)
from banaserve.engine.compat.scheduler import install_losses
from banaserve.engine.connector.block_hash import (
    TailHasher,
    check_model,
    describe_blocks,
    page_bytes,
)
from banaserve.engine.connector.cache_groups import CacheGroups, chunk_end, pages
from banaserve.engine.connector.latent_layout import check_latents
from banaserve.engine.connector.metadata import ConnectorOptions, StepResult, TransferStats
from banaserve.engine.connector.scheduler_side.scheduler import StoreConnectorScheduler
from banaserve.engine.connector.worker_side.worker import RankShare, StoreConnectorWorker
from banaserve.engine.engine_args import MIGRATION_KEY, PAGE_LAYOUT
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.client.cost_gate import CostGate
from banaserve.kvstore.stats import still_held

if TYPE_CHECKING:
    from banaserve.engine.compat.kv_cache import KVCacheBlocks, KVCacheConfig
    from banaserve.engine.compat.runner.attention import ForwardContext
    from banaserve.engine.compat.scheduler import Request, SchedulerOutput

logger = logging.getLogger(__name__)
_CONNECT_WITHIN_S = 30.0


class StoreConnector(ConnectorBase):
    """vLLM's KV connector of one engine; passes each hook to the scheduler's or worker's side.

    Its options are those of ``ConnectorOptions``, in ``kv_connector_extra_config``.

    Attributes:
        gate: Cost gate; decides in the scheduler's role, and learns nothing in the worker's role.
        holds_saves: True while layers run without being saved: other tokens of the step follow.
        worker_class: Class of the worker's side; that of a measurement may be another.
    """

    holds_saves = False
    worker_class = StoreConnectorWorker

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        check_model(vllm_config.model_config)
        self.fingerprint = describe_blocks(vllm_config, kv_cache_config)
        self._page_bytes = page_bytes(kv_cache_config)
        self._groups = CacheGroups.of(kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None, "vLLM makes a connector for a configuration with one only"
        options = ConnectorOptions.of(transfer.kv_connector_extra_config)
        self.socket = os.environ.get(STORE_VARIABLE, options.socket)
        self.client_name = client_name(transfer.engine_id)
        client = StoreClient(
            self.socket,
            self.fingerprint,
            client_name=self.client_name,
            num_writers=vllm_config.parallel_config.tensor_parallel_size,
            maps_pool=role is KVConnectorRole.WORKER,  # the scheduler reads no block
        )
        client.connect(within_s=_CONNECT_WITHIN_S)
        self._client = client
        block_size = self.fingerprint.block_size_tokens
        self.gate = CostGate(num_layers=self.fingerprint.num_layers, enabled=options.cost_gate)
        if role is KVConnectorRole.SCHEDULER:
            install_losses()
        self._scheduler = (
            StoreConnectorScheduler(
                client,
                TailHasher(vllm_config, block_size),
                block_size,
                self.gate,
                WallClock(),
                own_budget(vllm_config)[0],
                self._groups,
            )
            if role is KVConnectorRole.SCHEDULER
            else None
        )
        self._worker = (
            self.worker_class(client, self._share()) if role is KVConnectorRole.WORKER else None
        )

    def _share(self) -> RankShare:
        num_ranks = self._config.parallel_config.tensor_parallel_size
        is_whole = self.fingerprint.attention == "mla"
        return RankShare(get_tensor_model_parallel_rank(), num_ranks, is_whole)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a dropped save is a miss later, never a wrong result

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # full CUDA graphs replay without the layer hooks

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout whose heads can move, which vLLM follows if its attention has it."""
        additional: Any = vllm_config.additional_config
        return PAGE_LAYOUT if MIGRATION_KEY in additional else None

    # ---- scheduler

    @property
    def _planner(self) -> StoreConnectorScheduler:
        """The scheduler's side; in the scheduler's role only."""
        assert self._scheduler is not None
        return self._scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not is_shared(request):
            return 0, False
        return self._planner.match(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if is_shared(request):
            self._planner.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._planner.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        done = connector_output.kv_connector_worker_meta
        if self._scheduler is not None and isinstance(done, StepResult):
            self._scheduler.step_done(done)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    @property
    def keeps_states(self) -> bool:
        """True if steps have to stop where a state is to be saved; see ``chunk``."""
        return bool(self._groups.states)

    def chunk(self, start: int, num_tokens: int, prompt_end: int) -> int:
        """Return how many of the ``num_tokens`` tokens after ``start`` a step should compute."""
        block_size = self.fingerprint.block_size_tokens
        return chunk_end(start, start + num_tokens, prompt_end, block_size) - start

    def limit_steps(self, num_tokens: int) -> None:
        """Limit the tokens of later steps to ``num_tokens``; in the scheduler's role only."""
        self._planner.ahead.max_tokens = num_tokens

    def notes_of(self, names: list[str]) -> EngineAnswer:
        """Return the notes of the named requests; in the scheduler's role only.

        The list of a request that is unknown, or not kept any more, is empty.
        """
        return self._planner.notes.answer(names)

    # ---- worker

    @property
    def worker(self) -> StoreConnectorWorker:
        """The worker's side; in the worker's role only."""
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = self.kv_cache_config.kv_cache_groups[self._groups.attention].layer_names
        if self.keeps_states:
            rows = pages(self.kv_cache_config, kv_caches)
            self.worker.register(names, rows, self._page_bytes)
            return
        caches = {name: kv_caches[name] for name in names}
        if self.fingerprint.attention == "mla":
            attentions = self._config.compilation_config.static_forward_context
            for name, cache in caches.items():
                check_latents(attentions[name], cache, self._config.model_config.dtype)
        self.worker.register(names, list(caches.values()), self._page_bytes)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.begin_step(self.step_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.wait_for_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self.has_connector_metadata() and not self.holds_saves:
            self.worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.done()

    def get_kv_connector_stats(self) -> TransferStats | None:
        side = self._worker or self._scheduler
        assert side is not None
        return side.stats.take()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats | None:
        return TransferStats(data=data) if data else None

    def reset_cache(self) -> bool:
        """Drop all blocks in the store, of all clients; return whether pool and tiers are empty."""
        if self._client.clear() is None or (stats := self._client.stats()) is None:
            return False
        left = still_held(stats)
        for line in left:
            logger.warning("the store has been cleared and is not empty: %s", line)
        return not left

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._client.close()


def client_name(engine_id: str | None) -> str:
    """Return the name at the store that all processes of the engine have.

    With tensor parallelism, slots that the scheduler has reserved are written by other processes:
    the store gives them to others only after all processes of this name are dead.
    """
    return os.environ.get(INSTANCE_VARIABLE, f"engine-{engine_id}")


def is_shared(request: Request) -> bool:
    """Return whether the hashes of a request's blocks cover all that the blocks depend on.

    vLLM's cover the name and the path of an adapter, not its files. Only engines of a banaserve
    server know each load of an adapter by a name of its own.
    """
    return request.lora_request is None or INSTANCE_VARIABLE in os.environ


class StatesConnector(StoreConnector, SupportsHMA):
    """Connector for models that keep states (Mamba, linear attention) beside their KV blocks.

    vLLM lays the KV cache of such a model out in several groups only for a connector that supports
    them (``SupportsHMA``); other models have one group, and use ``StoreConnector``.
    """

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])
