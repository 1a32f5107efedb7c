"""One tier attached to the daemon: its queues and counters. A failing tier harms only itself."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from banaserve.errors import UserError
from banaserve.fail_points import FailPoint, reach
from banaserve.kvstore.daemon.promotion import TierSpeed
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.records import IndexEntry
from banaserve.kvstore.stats import TierReport
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    StoreTier,
    TierStats,
)
from banaserve.kvstore.tiers.registry import TierSpec, open_tier

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class TierLoad:
    """One block on its way from a tier to its slot.

    Attributes:
        entry: Of the block, pinned until the load has ended.
        began_s: When it was queued.
        queued_bytes: Queued in the tier at that moment, its own included.
        predicted_s: Seconds it was predicted to take; 0.0 where nothing was known.
        taken_s: When the tier took it.
    """

    entry: IndexEntry
    began_s: float
    queued_bytes: int
    predicted_s: float
    taken_s: float = 0.0


@dataclass(slots=True)
class AttachedTierCounters:
    """The counters of ``TierReport``."""

    promoted: int = 0
    promotion_failures: int = 0
    declined: int = 0
    predicted_fetch_s: float = 0.0
    measured_fetch_s: float = 0.0
    demoted: int = 0
    demotion_failures: int = 0
    dropped_before_demotion: int = 0


def attach(spec: TierSpec) -> AttachedTier:
    """Open a tier; where that fails it is attached out of service, with the reason."""
    try:
        return AttachedTier(spec.name, open_tier(spec))
    except Exception as error:
        problem = str(error) if isinstance(error, UserError) else describe(error)
        log.error("going on without the %s tier: %s", spec.name, problem)
        return AttachedTier(spec.name, None, problem)


def describe(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _of_length(number: int, states: list[Lookup]) -> list[Lookup]:
    if len(states) != number:
        raise ValueError(f"{len(states)} answers to {number} keys")
    return states


class AttachedTier:
    """A tier with its queues, counters and state of service.

    Whatever the tier raises takes it out of service at once: it says MISS to everything, and waits
    as ``is_faulty`` to be closed.

    Attributes:
        waiting: Loads that the tier has not taken yet.
        loading: Loads that it has taken, by ticket.
        storing: Blocks that it is writing, by ticket; pinned.
        backlog: Blocks that it has yet to write, by serial, oldest first; not pinned.
        queued_bytes: Of ``waiting`` and ``loading``.
        last_load_s: When a load last ended.
        problem: Why it is out of service; empty while it serves.
        fd: Readable when ``poll`` has something to return; -1 where there is no tier.
        is_faulty: It has raised and is to be closed.

    Args:
        name: Labels metrics.
        tier: None where it could not be opened.
        problem: Why not.
        takes_blocks: Whether blocks are to be written to it.
    """

    def __init__(
        self, name: str, tier: StoreTier | None, problem: str = "", *, takes_blocks: bool = True
    ) -> None:
        self.name = name
        self.problem = problem
        self.takes_blocks = takes_blocks
        self.speed = TierSpeed()
        self.counters = AttachedTierCounters()
        self.waiting: deque[TierLoad] = deque()
        self.loading: dict[int, TierLoad] = {}
        self.storing: dict[int, IndexEntry] = {}
        self.backlog: dict[int, IndexEntry] = {}
        self.queued_bytes = 0
        self.last_load_s = 0.0
        self.fd = -1
        self.is_faulty = False
        self._tier = tier
        self._faulty: StoreTier | None = None
        self._was_available = True
        if tier is not None:
            self.fd = self._guarded(lambda: tier.fd, -1)

    @property
    def is_open(self) -> bool:
        """Whether it may be asked anything."""
        return self._tier is not None

    @property
    def is_busy(self) -> bool:
        """Whether it reads or writes slots."""
        return bool(self.loading or self.storing)

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What it knows of each key; MISS for all while out of service."""
        misses = [Lookup.MISS] * len(keys)
        tier = self._tier
        if tier is None or not keys:
            return misses
        return self._guarded(lambda: _of_length(len(keys), tier.lookup(keys)), misses)

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """As the tier's."""
        tier = self._tier
        if tier is None:
            return None

        def submit() -> int | None:
            reach(FailPoint.SSD_READ)
            return tier.submit_load(key, target)

        return self._guarded(submit, None)

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """As the tier's."""
        tier = self._tier
        if tier is None:
            return None

        def submit() -> int | None:
            reach(FailPoint.SSD_WRITE)
            return tier.submit_store(block, source)

        return self._guarded(submit, None)

    def poll(self) -> list[Completion]:
        """As the tier's."""
        tier = self._tier
        return self._guarded(tier.poll, []) if tier is not None else []

    def clear(self) -> int:
        """Forget the backlog and every block that is not being read or written."""
        self.backlog.clear()
        tier = self._tier
        return self._guarded(tier.clear, 0) if tier is not None else 0

    def forget(self, serial: int) -> None:
        """A block has left memory; if it was still to be written, it is lost to this tier."""
        if self.backlog.pop(serial, None) is not None:
            self.counters.dropped_before_demotion += 1

    def report(self) -> TierReport:
        """Counters and gauges of this moment."""
        tier = self._tier
        stats = self._guarded(tier.stats, None) if tier is not None else None
        return TierReport(
            stats=stats or TierStats(name=self.name, available=False, problem=self.problem),
            promoted=self.counters.promoted,
            promotion_failures=self.counters.promotion_failures,
            declined=self.counters.declined,
            promoting_slots=len(self.waiting) + len(self.loading),
            predicted_fetch_s=self.counters.predicted_fetch_s,
            measured_fetch_s=self.counters.measured_fetch_s,
            demoted=self.counters.demoted,
            demotion_failures=self.counters.demotion_failures,
            dropped_before_demotion=self.counters.dropped_before_demotion,
            backlog_blocks=len(self.backlog),
        )

    def note_state(self) -> None:
        """Log where the tier has gone out of service or come back since the last call."""
        tier = self._tier
        stats = self._guarded(tier.stats, None) if tier is not None else None
        if stats is None or stats.available is self._was_available:
            return
        self._was_available = stats.available
        if stats.available:
            log.warning("the %s tier serves again", self.name)
        else:
            log.warning("going on without the %s tier: %s", self.name, stats.problem)

    def close_in_background(self, on_closed: Callable[[bool], None]) -> threading.Thread:
        """Close it for good, which takes the time of its last work.

        Args:
            on_closed: Called from the closing thread with whether nothing of it touches memory
                any more.
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
        thread.start()
        return thread

    def oldest_load_s(self) -> float | None:
        """When the tier took the oldest load that has not ended; None where there is none."""
        return min((load.taken_s for load in self.loading.values()), default=None)

    def give_up(self, problem: str) -> None:
        """Take it out of service, as if it had raised."""
        self.problem = problem
        self._faulty, self._tier = self._tier, None
        self.is_faulty = True

    def _guarded(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except Exception as error:
            self.give_up(describe(error))
            log.exception("going on without the %s tier: %s", self.name, self.problem)
            return otherwise
