"""The worker's side of the connector: fetch layer i+1, compute layer i, save layer i-1."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from banaserve.engine.vllm.copies import BlockCopier, make_copier
from banaserve.engine.vllm.transfer_plan import BlockCopy, Counters, StepDone, StepPlan
from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.pool import PoolView

logger = logging.getLogger(__name__)


class WorkerSide:
    """One per worker; its hooks run in the model runner's thread, its copies in two others."""

    def __init__(self, client: StoreClient, part: int) -> None:
        self._client = client
        self._part = part
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save")
        self._copier: BlockCopier | None = None
        self._layer_index: dict[str, int] = {}
        self._page_bytes = 0
        self._view: PoolView | None = None
        self._layer_loads: dict[str, Future[None]] = {}
        self._layer_saves: list[Future[None]] = []
        self._failed_blocks: set[int] = set()
        self._step_started_s = 0.0
        self.stats = Counters()

    def register(self, kv_caches: dict[str, torch.Tensor], page_bytes: int) -> None:
        """Take the engine's KV cache: one tensor ``[num_blocks, ...]`` a layer, in layer order."""
        self._layer_index = {name: i for i, name in enumerate(kv_caches)}
        self._copier = make_copier(list(kv_caches.values()), page_bytes, self._part)
        self._page_bytes = page_bytes

    # ---- one step, in the order in which vLLM calls

    def begin_step(self) -> None:
        self._step_started_s = time.perf_counter()

    def start_loads(self, plan: StepPlan) -> None:
        """Fetch what this step also writes into, then start fetching the rest layer by layer."""
        if not plan.loads and not plan.early_loads:
            return
        early = self._readable(plan.early_loads)
        for layer in range(len(self._layer_index)):
            self._load(layer, early)
        rest = self._readable(plan.loads)
        if rest:
            self._layer_loads = {
                name: self._loader.submit(self._load, layer, rest)
                for name, layer in self._layer_index.items()
            }
        self.stats.add(loaded_blocks=len(early) + len(rest))

    def wait_for_load(self, layer_name: str) -> None:
        future = self._layer_loads.pop(layer_name, None)
        if future is None:
            return
        started_s = time.perf_counter()
        future.result()
        self.stats.add(load_wait_seconds=time.perf_counter() - started_s)

    def save_layer(self, layer_name: str, plan: StepPlan) -> None:
        if not plan.saves:
            return
        assert self._copier is not None
        layer = self._layer_index[layer_name]
        self._layer_saves.append(
            self._saver.submit(self._save, layer, plan.saves, self._copier.mark())
        )

    def end_step(self, plan: StepPlan) -> None:
        """Wait for the copies; what was saved is readable by every instance on return."""
        for future in self._layer_loads.values():
            future.result()
        self._layer_loads.clear()
        started_s = time.perf_counter()
        self._commit(plan)
        now_s = time.perf_counter()
        if plan.saves:
            self.stats.add(save_wait_seconds=now_s - started_s)
        if self._step_started_s:
            self.stats.add(busy_seconds=now_s - self._step_started_s)

    def done(self, plan: StepPlan) -> StepDone:
        return StepDone(plan.step)

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose fetch failed since the last call: vLLM computes them again."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._loader.shutdown(wait=True)
        self._saver.shutdown(wait=True)

    # ---- copies

    def _readable(self, copies: Sequence[BlockCopy]) -> Sequence[BlockCopy]:
        """The copies whose slots this worker can see; the others are reported as failed."""
        if not copies:
            return copies
        view = self._current_view(copies[0].slot.generation)
        readable = [c for c in copies if view is not None and c.slot.generation == view.generation]
        lost = {c.block_id for c in copies} - {c.block_id for c in readable}
        if lost:
            logger.warning("%d KV blocks went away with the store: computed again", len(lost))
            self._failed_blocks |= lost
            self.stats.add(lost_blocks=len(lost))
        return readable

    def _current_view(self, generation: int) -> PoolView | None:
        if self._view is None or self._view.generation != generation:
            try:
                self._view = self._client.view(generation)
            except StoreUnavailableError:
                return None
        return self._view

    def _load(self, layer: int, copies: Sequence[BlockCopy]) -> None:
        if not copies:
            return
        assert self._copier is not None
        assert self._view is not None
        started_s = time.perf_counter()
        blocks, slots = [c.block_id for c in copies], [c.slot.index for c in copies]
        self._copier.load(layer, self._view, blocks, slots)
        self.stats.add(
            load_seconds=time.perf_counter() - started_s,
            loaded_bytes=len(copies) * self._page_bytes,
        )

    def _save(self, layer: int, copies: Sequence[BlockCopy], after: object) -> None:
        assert self._copier is not None
        view = self._current_view(copies[0].slot.generation)
        same = [c for c in copies if view is not None and c.slot.generation == view.generation]
        if view is None or not same:
            return
        started_s = time.perf_counter()
        blocks, slots = [c.block_id for c in same], [c.slot.index for c in same]
        self._copier.save(layer, view, blocks, slots, after)
        self.stats.add(
            save_seconds=time.perf_counter() - started_s,
            saved_bytes=len(same) * self._page_bytes,
        )

    def _commit(self, plan: StepPlan) -> None:
        for future in self._layer_saves:
            future.result()
        num_saved_layers = len(self._layer_saves)
        self._layer_saves.clear()
        if not plan.saves:
            return
        slots = [copy.slot for copy in plan.saves]
        # Blocks computed after a failed fetch hold garbage until vLLM has run the step again.
        if num_saved_layers < len(self._layer_index) or self._failed_blocks:
            self._client.abandon(slots, self._part)
            return
        if self._client.commit(slots, part=self._part):
            self.stats.add(saved_blocks=len(slots))
