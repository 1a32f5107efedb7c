"""Connector that records when each layer is fetched, computed and saved, and slows copies down."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import nan
from typing import Any

import torch

from banaserve.engine.connector.connector import StoreConnector
from banaserve.engine.connector.metadata import StepPlan
from banaserve.engine.connector.worker_side.block_copy import BlockCopier, Copy, EndedCopy
from banaserve.engine.connector.worker_side.worker import RankShare, StoreConnectorWorker
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.pool import Numbers, PoolView


class TracePoint(IntEnum):
    """Points at which a layer is stamped, in the order in which they are reached.

    A layer computes from WAITED to the next layer's WAIT, for which the engine's thread waits on a
    GPU. Copies without a limit of speed are stamped there when they are queued.
    """

    LOAD = 0
    LOADED = 1
    WAIT = 2
    WAITED = 3
    ATTENDED = 4
    SAVE = 5
    SAVED = 6


@dataclass(slots=True)
class StepTrace:
    """Trace of one step that copied blocks; times are seconds on the process's monotonic clock.

    Attributes:
        began_s: Begin of the step.
        forward_s: Time at which the forward pass could begin, its first fetches having ended.
        computed_s: End of the forward pass; the wait for saves follows.
        ended_s: Time at which all copies had ended and were committed.
        layers: Times ``[num_layers][TracePoint]``; nan for points that were not reached.
    """

    step: int
    began_s: float
    layers: list[list[float]]
    forward_s: float = nan
    computed_s: float = nan
    ended_s: float = nan
    fetched_blocks: int = 0

    def stamp(self, layer: int, point: TracePoint) -> None:
        """Record that a layer has reached a point.

        Each stamp has a place of its own, so the threads that stamp need no lock.
        """
        self.layers[layer][point] = time.perf_counter()


@dataclass(frozen=True, slots=True)
class CopyOptions:
    """Arrangement and speed of copies.

    Attributes:
        is_serial: True to fetch everything before the forward pass and to save everything after
            it, instead of layer by layer meanwhile.
        load_bytes_per_s: Maximum speed of fetches; 0 for no limit.
        save_bytes_per_s: Maximum speed of saves; 0 for no limit.
    """

    is_serial: bool = False
    load_bytes_per_s: float = 0.0
    save_bytes_per_s: float = 0.0


class TracedWorker(StoreConnectorWorker):
    """Worker's side that traces its steps.

    Attributes:
        options: Options of the copies; may change between two steps.
        traces: Traces of all steps that copied blocks, until the list is cleared.
        current: Trace of the step under way; None if the step copies nothing.
    """

    def __init__(self, client: StoreClient, share: RankShare) -> None:
        super().__init__(client, share)
        self.options = CopyOptions()
        self.traces: list[StepTrace] = []
        self.current: StepTrace | None = None
        self._deferred: list[str] = []

    def register(
        self, names: Sequence[str], caches: Sequence[torch.Tensor], page_bytes: int
    ) -> None:
        super().register(names, caches, page_bytes)
        self.wrap_copier(lambda inner: TracedCopier(inner, page_bytes, self))

    def stamp(self, layer: int, point: TracePoint) -> None:
        """Record that a layer of the step under way has reached a point."""
        if self.current is not None:
            self.current.stamp(layer, point)

    def begin_step(self, plan: StepPlan) -> None:
        super().begin_step(plan)
        self.current, self._deferred = None, []
        if plan.loads or plan.early_loads or plan.saves or plan.states:
            began_s = self._step.began_s
            layers = [[nan] * len(TracePoint) for _ in self._layer_index]
            self.current = StepTrace(plan.step, began_s, layers, forward_s=began_s)

    def start_loads(self) -> None:
        super().start_loads()
        if self.options.is_serial:
            began_s = time.perf_counter()
            for load in self._step.loads:
                load.result().join()
            self._waited(time.perf_counter() - began_s)
        plan = self._step.plan
        if self.current is not None and (plan.loads or plan.early_loads):
            self.current.forward_s = time.perf_counter()

    def wait_for_load(self, layer_name: str) -> None:
        layer = self._layer_index[layer_name]
        self._wait_for_work()
        self.stamp(layer, TracePoint.WAIT)
        super().wait_for_load(layer_name)
        self.stamp(layer, TracePoint.WAITED)

    def save_layer(self, layer_name: str) -> None:
        self.stamp(self._layer_index[layer_name], TracePoint.ATTENDED)
        if self.options.is_serial:
            self._deferred.append(layer_name)
        else:
            super().save_layer(layer_name)

    def _wait_for_work(self) -> None:
        """Wait until the engine has computed what it has queued."""
        assert self._copier is not None
        if self.current is not None and not self._copier.is_synchronous:
            self._copier.mark().synchronize()

    def end_step(self) -> None:
        self._wait_for_work()
        computed_s = time.perf_counter()
        for layer_name in self._deferred:
            super().save_layer(layer_name)
        super().end_step()
        if (trace := self.current) is not None:
            trace.computed_s, trace.ended_s = computed_s, time.perf_counter()
            trace.fetched_blocks = self._step.result.fetched_blocks
            self.traces.append(trace)


class TracedCopier:
    """Copier that stamps the copies of a worker and keeps to the speed in the worker's options.

    Args:
        inner: Copier that does the copying.
        page_bytes: Bytes of one layer of one block.
    """

    def __init__(self, inner: BlockCopier, page_bytes: int, worker: TracedWorker) -> None:
        self.is_synchronous = inner.is_synchronous
        self.mark, self.close = inner.mark, inner.close
        self._inner = inner
        self._page_bytes = page_bytes
        self._worker = worker

    def load(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        began_s = time.perf_counter()
        self._worker.stamp(layer, TracePoint.LOAD)
        copy = self._inner.load(layer, view, blocks, slots, after)
        held = self._held_back(copy, began_s, len(blocks), self._worker.options.load_bytes_per_s)
        self._worker.stamp(layer, TracePoint.LOADED)
        return held

    def save(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        began_s = time.perf_counter()
        self._worker.stamp(layer, TracePoint.SAVE)
        copy = self._inner.save(layer, view, blocks, slots, after)
        held = self._held_back(copy, began_s, len(blocks), self._worker.options.save_bytes_per_s)
        self._worker.stamp(layer, TracePoint.SAVED)
        return held

    def _held_back(self, copy: Copy, began_s: float, num_blocks: int, bytes_per_s: float) -> Copy:
        if not bytes_per_s:
            return copy
        copy.finish()
        until_s = began_s + num_blocks * self._page_bytes / bytes_per_s
        time.sleep(max(0.0, until_s - time.perf_counter()))
        return EndedCopy(time.perf_counter() - began_s)


class TracedConnector(StoreConnector):
    """Connector whose worker's side is a ``TracedWorker``."""

    worker_class = TracedWorker
