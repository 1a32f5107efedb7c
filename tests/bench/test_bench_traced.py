"""Traces and slowed copies of the pipeline's benchmark, over a real store."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from banaserve.engine.connector.worker_side.block_copy import BlockCopier
from benchmarks.drivers.traced_connector import CopyOptions, TracedWorker, TracePoint
from layered_engine import (
    LAYERS,
    PAGE_BYTES,
    LayeredEngine,
    LayeredEngines,
    number_blocks,
    numbered,
    started,
)


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[LayeredEngines]:
    socket_path = tmp_path / "store.sock"
    process = started(socket_path)
    with ExitStack() as stack:
        yield LayeredEngines(socket_path, "traced", stack)
    process.terminate()
    assert process.wait(60) == 0


def traced(
    engines: LayeredEngines,
    fill: float,
    options: CopyOptions = CopyOptions(),  # noqa: B008
) -> tuple[LayeredEngine, TracedWorker]:
    made = engines.make(fill, worker_class=TracedWorker)
    assert isinstance(made.worker, TracedWorker)
    made.worker.options = options
    return made, made.worker


@pytest.mark.parametrize("writes_serial", [False, True], ids=["pipelined", "serial"])
@pytest.mark.parametrize("reads_serial", [False, True], ids=["pipelined", "serial"])
def test_blocks_arrive_however_copies_are_arranged(
    engines: LayeredEngines, writes_serial: bool, reads_serial: bool
) -> None:
    writer, _ = traced(engines, 0.0, CopyOptions(writes_serial))
    assert writer.step(saves=writer.reserve(range(4)), compute=number_blocks).saved_blocks == 4
    reader, _ = traced(engines, -1.0, CopyOptions(reads_serial))
    hits = reader.acquire(range(4))
    assert reader.step(loads=hits[:3], early_loads=hits[3:]).fetched_blocks == 4
    for name, expected in numbered().items():
        assert torch.equal(reader.seen[name][:4], expected[:4])


def test_a_serial_forward_pass_that_did_not_end_publishes_nothing(engines: LayeredEngines) -> None:
    writer, _ = traced(engines, 0.0, CopyOptions(is_serial=True))
    writer.step(saves=writer.reserve(range(2)), num_layers=LAYERS - 1)
    assert writer.acquire(range(2)) == []


def test_copies_that_are_held_back_keep_to_their_speed(engines: LayeredEngines) -> None:
    writer, worker = traced(engines, 0.0, CopyOptions(save_bytes_per_s=4e6))
    writer.step(saves=writer.reserve(range(4)), compute=number_blocks)
    saved = worker.stats.take()
    assert saved is not None
    num_bytes = 4 * LAYERS * PAGE_BYTES
    assert saved.data["save_seconds"] >= num_bytes / 4e6
    reader, _ = traced(engines, -1.0, CopyOptions(load_bytes_per_s=2e6))
    done = reader.step(loads=reader.acquire(range(4)))
    assert done.fetch_s >= num_bytes / 2e6
    for name, expected in numbered().items():
        assert torch.equal(reader.seen[name][:4], expected[:4])


def test_the_trace_is_in_the_order_of_the_pipeline(engines: LayeredEngines) -> None:
    one, writes = traced(engines, 0.0)
    one.step(compute=number_blocks)
    one.step(saves=one.reserve(range(2)), compute=number_blocks)
    other, reads = traced(engines, -1.0)
    other.step(loads=other.acquire(range(2)))
    (saved,), (loaded,) = writes.traces, reads.traces
    for layer in loaded.layers:
        assert layer[TracePoint.LOAD] <= layer[TracePoint.LOADED] <= layer[TracePoint.WAITED]
        assert layer[TracePoint.WAIT] <= layer[TracePoint.WAITED] <= layer[TracePoint.ATTENDED]
        assert math.isnan(layer[TracePoint.SAVE])
    for layer in saved.layers:
        assert math.isnan(layer[TracePoint.LOAD])
        assert layer[TracePoint.ATTENDED] <= layer[TracePoint.SAVE] <= layer[TracePoint.SAVED]
        assert layer[TracePoint.SAVED] <= saved.ended_s
    loads = [layer[TracePoint.LOAD] for layer in loaded.layers]
    assert loads == sorted(loads)
    assert loaded.began_s <= loaded.forward_s <= loaded.computed_s <= loaded.ended_s
    assert loaded.fetched_blocks == 2


class QueuedWork:
    """A copier of an engine whose calls return before its work is done.

    Attributes:
        waits: Layers that had reached the wait for their fetch, at each wait for the work.
    """

    is_synchronous = False

    def __init__(self, inner: BlockCopier, worker: TracedWorker) -> None:
        self.waits: list[int] = []
        self.load, self.save, self.close = inner.load, inner.save, inner.close
        self._worker = worker

    def mark(self) -> Any:
        return SimpleNamespace(synchronize=self._synchronize)

    def _synchronize(self) -> None:
        assert self._worker.current is not None
        layers = self._worker.current.layers
        self.waits.append(sum(not math.isnan(layer[TracePoint.WAIT]) for layer in layers))


def test_layers_are_stamped_when_they_have_computed(engines: LayeredEngines) -> None:
    engine, worker = traced(engines, 0.0)
    made: list[QueuedWork] = []

    def wrap(inner: BlockCopier) -> BlockCopier:
        made.append(QueuedWork(inner, worker))
        return made[0]

    worker.wrap_copier(wrap)
    engine.step(compute=number_blocks)
    engine.step(saves=engine.reserve(range(2)), compute=number_blocks)
    assert made[0].waits == [*range(LAYERS), LAYERS], "and once at the end, if blocks are copied"
