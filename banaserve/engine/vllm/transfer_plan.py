"""What the scheduler's side of the connector tells the worker's side to copy in one step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from banaserve.kvstore.interface import Slot
from banaserve.orchestrator.model.calibration import StepWork


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One KV block of all layers, between the engine's block and the store's slot."""

    block_id: int
    slot: Slot


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies of one engine step.

    Attributes:
        step: Number of the step, for releasing its leases when it has run.
        loads: Fetched layer by layer, each before its layer's attention.
        early_loads: Blocks that this step also writes new tokens into: all their layers are
            fetched before the forward pass, or the fetch would overwrite the new tokens.
        saves: Copied out layer by layer, each after its layer's attention.
        work: What the step computes; None where it computes nothing.
        settled: What failed in steps up to this one was known when this step was planned.
    """

    step: int = 0
    loads: list[BlockCopy] = field(default_factory=list)
    early_loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)
    work: StepWork | None = None
    settled: int = 0


@dataclass
class StepDone(KVConnectorWorkerMetadata):
    """The worker's word that all copies of a step have ended, and what the step took.

    Attributes:
        step: Number of the step.
        compute_s: Seconds of the forward pass without waiting for copies; None where the worker
            cannot tell.
        fetch_s: Seconds of its fetches, whether or not anything waited for them.
        fetched_blocks: Blocks that they brought.
    """

    step: int
    compute_s: float | None = None
    fetch_s: float = 0.0
    fetched_blocks: int = 0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepDone:
        """Of two workers: the step has ended where both have, and the slower one counts."""
        assert isinstance(other, StepDone)
        computed = [s for s in (self.compute_s, other.compute_s) if s is not None]
        return StepDone(
            min(self.step, other.step),
            max(computed, default=None),
            max(self.fetch_s, other.fetch_s),
            max(self.fetched_blocks, other.fetched_blocks),
        )


@dataclass
class TransferStats(KVConnectorStats):
    """What was counted since the last report; every value is a sum."""

    data: dict[str, float] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> TransferStats:
        names = self.data.keys() | other.data.keys()
        return TransferStats(
            data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names}
        )

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Counters:
    """Sums that several threads add to and one takes away."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._data[name] = self._data.get(name, 0) + amount

    def take(self) -> TransferStats | None:
        """The sums so far, which start again from zero; None if nothing was counted."""
        with self._lock:
            taken, self._data = self._data, {}
        return TransferStats(data=taken) if taken else None


def stats_from_wire(data: dict[str, Any] | None) -> TransferStats | None:
    return TransferStats(data=data) if data else None
