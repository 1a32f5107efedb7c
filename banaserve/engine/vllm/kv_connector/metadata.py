"""Values that the connector's two sides exchange: options, copies of a step, results, counters."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from banaserve.engine.vllm.compat.kv_connector import (
    KVConnectorMetadata,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)
from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.interface import Slot
from banaserve.kvstore.pool import Numbers, PoolView
from banaserve.names import check_known
from banaserve.orchestrator.model.calibration import StepWork

_ARRANGEMENTS = ("pipelined", "serial")


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Options of one engine's connector.

    The last five serve measurements; their defaults are what serving wants.

    Attributes:
        socket: Path of the store's socket.
        salt: Deployments with different salts never share blocks.
        cost_gate: Whether of a prefix only what shortens its step is fetched, or all of it.
        arrangement: "pipelined" fetches layer i+1 and saves layer i-1 while layer i computes;
            "serial" fetches everything before the forward pass and saves everything after it.
        load_bytes_per_s: Fetches are held back to this speed; 0 does not.
        save_bytes_per_s: The same for saves.
        trace: Whether to keep when each layer was fetched, computed and saved.
    """

    socket: str
    salt: str = ""
    cost_gate: bool = True
    arrangement: str = "pipelined"
    load_bytes_per_s: float = 0.0
    save_bytes_per_s: float = 0.0
    trace: bool = False

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> ConnectorOptions:
        """Read and check.

        Raises:
            UserError: An unknown option, one of the wrong kind, or no socket.
        """
        defaults = {field.name: field.default for field in fields(cls)}
        for name in extra_config:
            check_known("option of the store's connector", name, defaults)
        if not extra_config.get("socket"):
            raise UserError("the store's connector needs the option socket: the store's socket")
        options = cls(**{name: _checked(name, value) for name, value in extra_config.items()})
        check_known("arrangement", options.arrangement, _ARRANGEMENTS)
        return options


def _checked(name: str, value: Any) -> Any:
    if name in ("cost_gate", "trace"):
        fits = isinstance(value, bool)
    elif name.endswith("_per_s"):
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    else:
        fits = isinstance(value, str)
    if not fits:
        raise UserError(f"the store's connector cannot use {name}={value!r}")
    return value


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
        states: Copied out behind the forward pass, which changes them to its end.
        pushed: Of ``saves``, slots whose blocks go to another machine's store meanwhile: it is told
            of each layer that is saved.
        work: What the step computes; None where it computes nothing.
        settled: What failed in steps up to this one was known when this step was planned.
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
    """Report of the worker that all copies of a step have ended, and the step's times.

    Attributes:
        step: Number of the step.
        compute_s: Seconds of the forward pass without waiting for copies; None where the worker
            cannot tell.
        fetch_s: Seconds of its fetches, whether or not anything waited for them.
        fetched_blocks: Blocks that they brought.
        saved_blocks: Blocks that were committed to the store.
        save_s: Seconds of its saves and their commit, whether or not anything waited for them.
    """

    step: int
    compute_s: float | None = None
    fetch_s: float = 0.0
    fetched_blocks: int = 0
    saved_blocks: int = 0
    save_s: float = 0.0

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepResult:
        """Of two workers: the step has ended where both have, and the slower one counts."""
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


class ConnectorCounters:
    """Sums that several threads add to and one takes away."""

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
        """The sums so far, which start again from zero; None if nothing was counted."""
        with self._lock:
            taken, self._data = self._data, {}
        return TransferStats(data=taken) if taken else None


def stats_from_wire(data: dict[str, Any] | None) -> TransferStats | None:
    return TransferStats(data=data) if data else None


@dataclass(frozen=True)
class MappedCopies:
    """Copies whose slots all lie in ``view``: in the pool of another life of the store, their
    places would hold other blocks. Without a view there are no copies.

    The numbers are made once and serve every layer: made anew for each they cost as much as
    copying a block or two.
    """

    view: PoolView | None = None
    copies: Sequence[BlockCopy] = ()

    @cached_property
    def block_ids(self) -> Numbers:
        """The engine's blocks, ``[num_copies]`` int64, in the order of ``copies``."""
        return np.fromiter((copy.block_id for copy in self.copies), np.int64, len(self.copies))

    @cached_property
    def slots(self) -> Numbers:
        """The store's slots, ``[num_copies]`` int64, in the order of ``copies``."""
        return np.fromiter((copy.slot.index for copy in self.copies), np.int64, len(self.copies))

    @classmethod
    def of(cls, copies: Sequence[BlockCopy], client: StoreClient) -> MappedCopies:
        """Those of ``copies`` that ``client`` sees; connects where it has to."""
        view: PoolView | None = None
        for generation in {copy.slot.generation for copy in copies}:
            # Of two lives of the store the client knows one: the later, where it can.
            with suppress(StoreUnavailableError):
                view = client.view(generation)
        if view is None:
            return cls()
        return cls(view, [copy for copy in copies if copy.slot.generation == view.generation])
