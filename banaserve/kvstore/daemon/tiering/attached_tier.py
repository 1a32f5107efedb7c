"""Tier attached to the daemon: its queues and counters. A failing tier affects no other tier."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.kvstore.daemon.tiering.promotion_choice import TierSpeed
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.stats import CopyCounters, TierReport
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    StoreTier,
    TierStats,
)

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class TierLoad:
    """Load of a block from a tier into its slot.

    Attributes:
        entry: Index entry of the block, pinned until the load has ended.
        began_s: Time at which the load was queued, in seconds.
        queued_bytes: Bytes queued in the tier at that time, including those of this load.
        predicted_s: Predicted duration in seconds; 0.0 if the tier's speed was not known.
        taken_s: Time at which the tier accepted the load, in seconds.
    """

    entry: IndexEntry
    began_s: float
    queued_bytes: int
    predicted_s: float
    taken_s: float = 0.0


def attach(name: str, open_tier: Callable[[], StoreTier]) -> AttachedTier:
    """Open and attach a tier; if opening fails, attach it out of service with the reason."""
    try:
        return AttachedTier(name, open_tier())
    except Exception as error:
        problem = str(error) if isinstance(error, UserError) else _describe(error)
        log.error("going on without the %s tier: %s", name, problem)
        return AttachedTier(name, None, problem)


def _describe(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class AttachedTier:
    """Tier with its queues, counters and service state.

    Any exception of the tier takes it out of service at once: it then answers MISS to every key,
    and is marked ``is_faulty`` until it is closed.

    Attributes:
        waiting: Loads that the tier has not accepted yet.
        loading: Loads that the tier has accepted, by ticket.
        storing: Blocks that the tier is writing, by ticket; pinned.
        backlog: Blocks still to be written to the tier, by serial, oldest first; not pinned.
        last_load_s: Time at which a load last ended, in seconds.
        problem: Reason why the tier is out of service; empty while it serves.
        fd: File descriptor, readable when ``poll`` has something to return; -1 without a tier.
        is_faulty: True if the tier has raised and is still to be closed.

    Args:
        tier: Opened tier; None if it could not be opened, with the reason in ``problem``.
        takes_blocks: True if blocks are to be written to the tier.
    """

    def __init__(
        self, name: str, tier: StoreTier | None, problem: str = "", *, takes_blocks: bool = True
    ) -> None:
        self.name = name
        self.problem = problem
        self.takes_blocks = takes_blocks
        self.speed = TierSpeed()
        self.counters = CopyCounters()
        self.waiting: deque[TierLoad] = deque()
        self.loading: dict[int, TierLoad] = {}
        self.storing: dict[int, IndexEntry] = {}
        self.backlog: dict[int, IndexEntry] = {}
        self.last_load_s = 0.0
        self.is_faulty = False
        self._tier = tier
        self._faulty: StoreTier | None = None
        self._was_available = True
        self.fd = self._guarded(lambda tier: tier.fd, -1)

    @property
    def is_open(self) -> bool:
        """Return whether the tier may be called."""
        return self._tier is not None

    @property
    def num_queued(self) -> int:
        """Number of loads that have not ended."""
        return len(self.waiting) + len(self.loading)

    @property
    def is_busy(self) -> bool:
        """Return whether the tier is reading or writing slots."""
        return bool(self.loading or self.storing)

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the tier's state of each key; MISS for all while out of service."""

        def look(tier: StoreTier) -> list[Lookup]:
            states = tier.lookup(keys)
            if len(states) != len(keys):
                raise ValueError(f"{len(states)} answers to {len(keys)} keys")
            return states

        return self._guarded(look, [Lookup.MISS] * len(keys)) if keys else []

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Submit a load, see ``StoreTier.submit_load``; None while out of service."""

        def submit(tier: StoreTier) -> int | None:
            reach(FailPoint.SSD_READ)
            return tier.submit_load(key, target)

        return self._guarded(submit, None)

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Submit a store, see ``StoreTier.submit_store``; None while out of service."""

        def submit(tier: StoreTier) -> int | None:
            reach(FailPoint.SSD_WRITE)
            return tier.submit_store(block, source)

        return self._guarded(submit, None)

    def poll(self) -> list[Completion]:
        """Return the tier's completions, see ``StoreTier.poll``; none while out of service."""
        return self._guarded(lambda tier: tier.poll(), [])

    def clear(self) -> int:
        """Drop the backlog and every block in the tier that is not in use; return their number."""
        self.backlog.clear()
        return self._guarded(lambda tier: tier.clear(), 0)

    def forget(self, serial: int) -> None:
        """Drop a block that has left memory from the backlog; if it was there, count it."""
        if self.backlog.pop(serial, None) is not None:
            self.counters.dropped_before_demotion += 1

    def report(self) -> TierReport:
        """Return the current counters and gauges."""
        stats = self._guarded(lambda tier: tier.stats(), None)
        return TierReport(
            stats=stats or TierStats(name=self.name, available=False, problem=self.problem),
            promoting_slots=self.num_queued,
            backlog_blocks=len(self.backlog),
            **msgspec.structs.asdict(self.counters),
        )

    def note_state(self) -> None:
        """Log if the tier has gone out of service or come back since the last call."""
        stats = self._guarded(lambda tier: tier.stats(), None)
        if stats is None or stats.available is self._was_available:
            return
        self._was_available = stats.available
        if stats.available:
            log.warning("the %s tier serves again", self.name)
        else:
            log.warning("going on without the %s tier: %s", self.name, stats.problem)

    def close_in_background(self, on_closed: Callable[[bool], None]) -> threading.Thread:
        """Close the tier for good, which takes until its last transfers have ended.

        The closing thread calls ``on_closed``, with True if the tier no longer touches memory.
        """
        tier = self._tier or self._faulty
        assert tier is not None
        self._tier = self._faulty = None
        self.is_faulty = False

        def close() -> None:
            try:
                tier.close()
            except Exception as error:
                log.error("cannot close the %s tier: %s", self.name, error)
                on_closed(False)
            else:
                on_closed(True)

        thread = threading.Thread(target=close, name=f"close-{self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the process or its container has no more threads
            log.error("cannot close the %s tier: %s", self.name, error)
            on_closed(False)
        return thread

    def give_up(self, problem: str) -> None:
        """Take the tier out of service, as if it had raised."""
        self.problem = problem
        self._faulty, self._tier = self._tier, None
        self.is_faulty = True

    def _guarded(self, call: Callable[[StoreTier], T], otherwise: T) -> T:
        """Call the tier; return ``otherwise`` if it raises, or is out of service already."""
        if self._tier is None:
            return otherwise
        try:
            return call(self._tier)
        except Exception as error:
            self.give_up(_describe(error))
            log.exception("going on without the %s tier: %s", self.name, self.problem)
            return otherwise
