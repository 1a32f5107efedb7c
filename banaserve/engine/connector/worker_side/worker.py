"""Worker side of the connector: fetch layer i+1, compute layer i, save layer i-1."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import torch

from banaserve.base.errors import StoreUnavailableError
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.engine.connector.metadata import (
    BlockCopy,
    ConnectorCounters,
    MappedCopies,
    StepPlan,
    StepResult,
)
from banaserve.engine.connector.worker_side.block_copy import (
    BlockCopier,
    Copy,
    EndedCopy,
    make_copier,
)
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.pool import PoolView
from banaserve.orchestrator.control.costs.transfers import StepTimes

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RunningStep:
    """Copies of one step.

    Attributes:
        early: Fetches that must end before the forward pass begins.
        loads: A fetch for each layer, in the order of the layers; empty where nothing is fetched.
        target: Saves that can be made, with their slots; None until they are first needed.
        written: Layers written so far, in any order.
        num_told: Number of layers, from the first on, that the store knows to be written.
    """

    plan: StepPlan
    began_s: float
    result: StepResult
    early: list[Copy] = field(default_factory=list)
    loads: list[Future[Copy]] = field(default_factory=list)
    saves: list[Future[Copy | None]] = field(default_factory=list)
    target: MappedCopies | None = None
    written: set[int] = field(default_factory=set)
    num_told: int = 0
    waited_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, plan: StepPlan, began_s: float) -> RunningStep:
        return cls(plan, began_s, StepResult(plan.step))

    def target_of(self, client: StoreClient) -> MappedCopies:
        """Return the saves of the step that can be made: the same for every layer and thread.

        A slot that was visible for some layers only must not be committed.
        """
        with self.lock:
            if self.target is None:
                self.target = MappedCopies.of(self.plan.saves, client)
            return self.target

    def note_written(self, layers: Iterable[int], client: StoreClient, part: int) -> None:
        """Tell the store that some layers have been copied into the slots, if it pushes them."""
        if not self.plan.pushed:
            return
        with self.lock:
            self.written.update(layers)
            num_layers = self.num_told
            while num_layers in self.written:
                num_layers += 1
            if num_layers > self.num_told and self.target is not None:
                self.num_told = num_layers
                visible = {copy.slot for copy in self.target.copies}
                slots = [slot for slot in self.plan.pushed if slot in visible]
                client.note_written(slots, num_layers, part)


@dataclass(frozen=True, slots=True)
class RankShare:
    """Share of a block that a tensor-parallel rank reads and writes.

    Attributes:
        rank: Rank out of ``num_ranks``; each rank reports its own writes.
        is_whole: True if each rank holds whole blocks, as with latents (MLA): it reads all of a
            block and writes some of its layers. Otherwise each rank has a part of its own.
    """

    rank: int = 0
    num_ranks: int = 1
    is_whole: bool = False

    @property
    def part(self) -> int:
        """Index of this rank's part of a layer's block."""
        return 0 if self.is_whole else self.rank

    def writes(self, layer: int) -> bool:
        """Return whether this rank writes the layer, or its part of the layer."""
        return not self.is_whole or layer % self.num_ranks == self.rank


class StoreConnectorWorker:
    """Connector side of one worker.

    Its hooks run in the model runner's thread, as do the copies of ``early_loads`` and of states.
    One other thread fetches the other blocks layer by layer, another one saves them.

    Attributes:
        part: See ``RankShare``.
        modelled: Modelled times of the step under way, reported and counted in place of the
            measured ones; None where time is not modelled.
    """

    def __init__(self, client: StoreClient, share: RankShare) -> None:
        self.part = share.part
        self._client = client
        self._share = share
        self._part = share.rank
        self._loader = ThreadPoolExecutor(1, "kv-load")
        self._saver = ThreadPoolExecutor(1, "kv-save")
        self._copier: BlockCopier | None = None
        self._layer_index: dict[str, int] = {}
        self._num_rows = 0
        self._page_bytes = 0
        self._step = RunningStep.of(StepPlan(), 0.0)
        self._failed_blocks: set[int] = set()
        self._last_failed_step = 0
        self._is_abandoned = False
        self.stats = ConnectorCounters()
        self.modelled: StepTimes | None = None

    def register(
        self, names: Sequence[str], caches: Sequence[torch.Tensor], page_bytes: int
    ) -> None:
        """Take the engine's KV cache.

        Args:
            names: Names of the layers that attend to blocks of tokens, in their order.
            caches: Tensors ``[num_blocks, ...]``, one for each of these layers; more tensors where
                a group of layers with states is larger.
        """
        self._layer_index = {name: i for i, name in enumerate(names)}
        self._num_rows = len(caches)
        self._page_bytes = page_bytes
        view: PoolView | None = None
        with contextlib.suppress(StoreUnavailableError):
            view = self._client.view()
        self._copier = make_copier(caches, page_bytes, self._share.part, view)

    def wrap_copier(self, wrap: Callable[[BlockCopier], BlockCopier]) -> None:
        """Send copies through another copier from now on: parts of the cache are elsewhere."""
        assert self._copier is not None
        self._copier = wrap(self._copier)

    def abandon_step(self) -> None:
        """Commit no save of the step under way, or of the next step if none is under way."""
        self._is_abandoned = True

    # ---- one step, in the order in which vLLM calls

    def begin_step(self, plan: StepPlan) -> None:
        self._step = RunningStep.of(plan, time.perf_counter())
        if self._client.let_go_if_lost() and self._copier is not None:
            self._copier.close()

    def start_loads(self) -> None:
        """Fetch the blocks that this step also writes into, then start the others by layer."""
        plan = self._step.plan
        if not plan.loads and not plan.early_loads:
            return
        assert self._copier is not None
        began_s = time.perf_counter()
        after = self._copier.mark()
        early = self._readable(plan.early_loads)
        rest = self._readable(plan.loads)
        if early.copies:
            rows = range(self._num_rows)
            self._step.early = [self._load(row, early, after) for row in rows]
        if rest.copies:
            self._step.loads = [
                self._loader.submit(self._load, layer, rest, after)
                for layer in self._layer_index.values()
            ]
        self._step.result.fetched_blocks = len(early.copies) + len(rest.copies)
        self.stats.add(loaded_blocks=self._step.result.fetched_blocks)
        for copy in self._step.early:
            copy.join()
        self._waited(time.perf_counter() - began_s)

    # A layer without an index reads the KV of an earlier one, which has waited and is saved.

    def wait_for_load(self, layer_name: str) -> None:
        layer = self._layer_index.get(layer_name)
        if self._step.loads and layer is not None:
            began_s = time.perf_counter()
            self._step.loads[layer].result().join()
            self._waited(time.perf_counter() - began_s)

    def save_layer(self, layer_name: str) -> None:
        layer = self._layer_index.get(layer_name)
        if self._step.plan.saves and layer is not None:
            assert self._copier is not None
            after = self._copier.mark()
            self._step.saves.append(self._saver.submit(self._save, self._step, layer, after))

    def slots_to_fill(self) -> MappedCopies:
        """Return this step's saves, which a guest with some of the layers makes for this worker."""
        return self._step.target_of(self._client)

    def saved_elsewhere(self, layer_names: Sequence[str], seconds: float) -> None:
        """Record that a guest made the saves of ``slots_to_fill`` for these layers.

        Replaces ``save_layer`` for these layers.

        Args:
            seconds: Time that the copies of all these layers took.
        """
        assert self._step.target is not None
        for _ in layer_names:
            save: Future[Copy | None] = Future()
            save.set_result(EndedCopy(seconds / len(layer_names)))
            self._step.saves.append(save)
        layers = [self._layer_index[name] for name in layer_names]
        self._step.note_written(layers, self._client, self._part)
        num_bytes = len(layer_names) * len(self._step.target.copies) * self._page_bytes
        self.stats.add(saved_bytes=num_bytes, guest_saved_bytes=num_bytes)

    def end_step(self) -> None:
        """Wait for the copies; on return every instance can read the saved blocks."""
        computed_s = time.perf_counter()
        loads = [future.result() for future in self._step.loads]
        self._step.result.fetch_s = self._finish([*self._step.early, *loads])
        self._commit(self._save_states())
        self._measure(computed_s, time.perf_counter())

    def done(self) -> StepResult:
        return self._step.result

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks whose fetch failed since the last call: vLLM computes them again."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._loader.shutdown(wait=True)
        self._saver.shutdown(wait=True)
        if self._copier is not None:
            self._copier.close()

    # ---- what it took

    def _measure(self, computed_s: float, now_s: float) -> None:
        step = self._step
        plan, result = step.plan, step.result
        if not step.began_s:
            return
        if plan.work is not None:
            self.stats.add(steps=1, **{f"step_{n}": v for n, v in asdict(plan.work).items()})
        if (times := self.modelled) is not None:
            result.compute_s, result.fetch_s = times.compute_s, times.fetch_s
            self.stats.add(
                busy_seconds=times.step_s,
                load_seconds=times.fetch_s,
                load_wait_seconds=max(0.0, times.step_s - times.compute_s),
            )
            return
        self.stats.add(busy_seconds=now_s - step.began_s)
        if result.fetched_blocks:
            self.stats.add(load_seconds=result.fetch_s)
        if plan.saves:
            self.stats.add(save_wait_seconds=now_s - computed_s)
        assert self._copier is not None
        if self._copier.is_synchronous:
            result.compute_s = computed_s - step.began_s - step.waited_s
        elif plan.saves and not result.fetched_blocks:
            # The last layer's save ends after that layer, so the host's clock covers all the work.
            result.compute_s = now_s - step.began_s

    def _waited(self, seconds: float) -> None:
        self._step.waited_s += seconds
        if self.modelled is None:
            self.stats.add(load_wait_seconds=seconds)

    # ---- copies

    @staticmethod
    def _finish(copies: Sequence[Copy]) -> float:
        return sum(copy.finish() for copy in copies)

    def _readable(self, copies: Sequence[BlockCopy]) -> MappedCopies:
        """Return the copies whose slots this worker can see; the others are reported as failed."""
        visible = MappedCopies.of(copies, self._client)
        lost = {c.block_id for c in copies} - {c.block_id for c in visible.copies}
        if lost:
            logger.warning("%d KV blocks went away with the store: computed again", len(lost))
            self._failed_blocks |= lost
            self._last_failed_step = self._step.plan.step
            self.stats.add(lost_blocks=len(lost))
        return visible

    def _load(self, layer: int, source: MappedCopies, after: object) -> Copy:
        assert self._copier is not None
        assert source.view is not None
        reach(FailPoint.CONNECTOR_LOAD)
        copy = self._copier.load(layer, source.view, source.block_ids, source.slots, after)
        self.stats.add(loaded_bytes=len(source.copies) * self._page_bytes)
        return copy

    def _save(self, step: RunningStep, layer: int, after: object) -> Copy | None:
        target = step.target_of(self._client)
        if target.view is None:
            return None
        copy: Copy = EndedCopy(0.0)
        if self._share.writes(layer):
            copy = self._copy_out(layer, target, after)
        if step.plan.pushed:
            copy.finish()  # a layer must not be sent before it is copied
            step.note_written([layer], self._client, self._part)
        return copy

    def _copy_out(self, row: int, target: MappedCopies, after: object) -> Copy:
        """Copy blocks' pages in one row into their slots."""
        assert self._copier is not None
        assert target.view is not None
        reach(FailPoint.CONNECTOR_SAVE)
        copy = self._copier.save(row, target.view, target.block_ids, target.slots, after)
        self.stats.add(saved_bytes=len(target.copies) * self._page_bytes)
        return copy

    def _save_states(self) -> tuple[MappedCopies, list[Copy]]:
        """Start saving the states after the step's last token; none is final earlier."""
        if not (states := self._step.plan.states):
            return MappedCopies(), []
        assert self._copier is not None
        target, after = MappedCopies.of(states, self._client), self._copier.mark()
        if target.view is None:
            return target, []
        return target, [self._copy_out(row, target, after) for row in range(self._num_rows)]

    def _commit(self, states: tuple[MappedCopies, list[Copy]]) -> None:
        plan, result = self._step.plan, self._step.result
        copies = [future.result() for future in self._step.saves]
        is_abandoned, self._is_abandoned = self._is_abandoned, False
        save_s = self._finish([*(copy for copy in copies if copy is not None), *states[1]])
        if not plan.saves and not plan.states:
            return
        self.stats.add(save_seconds=save_s)
        began_s = time.perf_counter()
        target = self._step.target
        if target is None or len(copies) < len(self._layer_index):
            target = MappedCopies()
        # Blocks computed after a failed fetch hold garbage until vLLM has run the step again.
        is_garbage = is_abandoned or plan.settled < self._last_failed_step
        written = [] if is_garbage else [*target.copies, *states[0].copies]
        saved = [copy.slot for copy in written]
        given_up = {copy.slot for copy in (*plan.saves, *plan.states)}.difference(saved)
        self._client.abandon(list(given_up), self._part)
        if saved and self._client.commit(saved, part=self._part):
            result.saved_blocks = len(saved)
            self.stats.add(saved_blocks=len(saved))
        result.save_s = save_s + time.perf_counter() - began_s
