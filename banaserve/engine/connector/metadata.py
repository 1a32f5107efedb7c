"""Values that the connector's two sides exchange: options, copies of a step, results, counters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.base.text.names import check_known
from banaserve.engine.compat.kv_connector import (
    KVConnectorMetadata,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.leases import Slot
from banaserve.kvstore.pool import Numbers, PoolView
from banaserve.orchestrator.control.model.learnt_time import StepWork


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of one engine's connector.

    Attributes:
        socket: Path of the store's socket.
        salt: Salt of the block keys; deployments with different salts never share blocks.
        cost_gate: True if only the part of a prefix that shortens its step is fetched; otherwise
            all of it.
    """

    socket: str
    salt: str = ""
    cost_gate: bool = True

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> ConnectorOptions:
        """Read and check the options.

        Raises:
            UserError: An option is unknown or of the wrong type, or the socket is missing.
        """
        for name in extra_config:
            check_known("option of the store's connector", name, cls.__struct_fields__)
        if not extra_config.get("socket"):
            raise UserError("the store's connector needs the option socket: the store's socket")
        try:
            return msgspec.convert(dict(extra_config), cls)
        except msgspec.ValidationError as wrong:
            raise UserError(f"the store's connector cannot use its options: {wrong}") from None


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy of one KV block, all its layers, between the engine's block and the store's slot."""

    block_id: int
    slot: Slot


@dataclass
class StepPlan(KVConnectorMetadata):
    """Copies of one engine step.

    Attributes:
        step: Number of the step, for releasing its leases when it has run.
        loads: Blocks fetched layer by layer, each layer before its attention.
        early_loads: Blocks that this step also writes new tokens into: all their layers are
            fetched before the forward pass, or the fetch would overwrite the new tokens.
        saves: Blocks copied out layer by layer, each layer after its attention.
        states: States copied out after the forward pass, which changes them until its end.
        pushed: Slots of ``saves`` whose blocks are sent to another machine's store meanwhile: the
            store is told of each layer that is saved.
        work: Work of the step; None if it computes nothing.
        settled: Number of the last step whose failures were known when this step was planned.
    """

    step: int = 0
    loads: list[BlockCopy] = field(default_factory=list)
    early_loads: list[BlockCopy] = field(default_factory=list)
    saves: list[BlockCopy] = field(default_factory=list)
    states: list[BlockCopy] = field(default_factory=list)
    pushed: list[Slot] = field(default_factory=list)
    work: StepWork | None = None
    settled: int = 0


@dataclass
class StepResult(KVConnectorWorkerMetadata):
    """Worker's report that all copies of a step have ended, with the step's times.

    Attributes:
        compute_s: Seconds of the forward pass without waiting for copies; None where the worker
            cannot tell.
        fetch_s: Seconds of the step's fetches, whether or not anything waited for them.
        save_s: Seconds of the saves and their commit, whether or not anything waited for them.
    """

    step: int
    compute_s: float | None = None
    fetch_s: float = 0.0
    fetched_blocks: int = 0
    saved_blocks: int = 0
    save_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResult:
        """Merge the results of two workers: a step ends when both end it; the slower one counts."""
        assert isinstance(other, StepResult)
        computed = [s for s in (self.compute_s, other.compute_s) if s is not None]
        return StepResult(
            min(self.step, other.step),
            max(computed, default=None),
            max(self.fetch_s, other.fetch_s),
            max(self.fetched_blocks, other.fetched_blocks),
            min(self.saved_blocks, other.saved_blocks),
            max(self.save_s, other.save_s),
        )


@dataclass
class TransferStats(KVConnectorStats):
    """Counters since the last report; every value is a sum."""

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


class ConnectorCounters:
    """Sums that several threads add to and one thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._data[name] = self._data.get(name, 0) + amount

    def set(self, **values: float) -> None:
        """Set gauges, whose values are the sums of all changes that have been taken."""
        for name, value in values.items():
            if change := value - self._gauges.get(name, 0.0):
                self._gauges[name] = value
                self.add(**{name: change})

    def take(self) -> TransferStats | None:
        """Return the sums so far and restart them from zero; None if nothing was counted."""
        with self._lock:
            taken, self._data = self._data, {}
        return TransferStats(data=taken) if taken else None


@dataclass(frozen=True)
class MappedCopies:
    """Copies whose slots are all in ``view``; without a view there are no copies.

    In the pool of another generation of the store, the same slots would hold other blocks. The
    numbers are made once for all layers: making them for each layer would cost as much as copying
    a block or two.
    """

    view: PoolView | None = None
    copies: Sequence[BlockCopy] = ()

    @cached_property
    def block_ids(self) -> Numbers:
        """Ids of the engine's blocks, ``[num_copies]`` int64, in the order of ``copies``."""
        return np.fromiter((copy.block_id for copy in self.copies), np.int64, len(self.copies))

    @cached_property
    def slots(self) -> Numbers:
        """Indices of the store's slots, ``[num_copies]`` int64, in the order of ``copies``."""
        return np.fromiter((copy.slot.index for copy in self.copies), np.int64, len(self.copies))

    @classmethod
    def of(cls, copies: Sequence[BlockCopy], client: StoreClient) -> MappedCopies:
        """Return the ``copies`` whose slots ``client`` can see; connects to the store if needed."""
        view: PoolView | None = None
        for generation in {copy.slot.generation for copy in copies}:
            # Of two generations of the store the client knows one: the later, where it can.
            with suppress(StoreUnavailableError):
                view = client.view(generation)
        if view is None:
            return cls()
        return cls(view, [copy for copy in copies if copy.slot.generation == view.generation])
