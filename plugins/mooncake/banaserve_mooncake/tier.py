"""Mooncake tier: blocks in the memory of many machines behind one ``mooncake_master``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.counters import TierCounters
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    TierOutcome,
    TierStats,
)
from banaserve_mooncake.config import MooncakeConfig, check_installed, parse_url
from banaserve_mooncake.events import AskedKeys, Event, Health, MooncakeJob, Removed
from banaserve_mooncake.link import MooncakeLink

_HIT_VALID_S = 5.0
# A peer may be storing the block at this moment.
_MISS_VALID_S = 1.0
_MAX_ANSWERS = 65536
_MAX_ASKED = 16384
_MAX_OWN = 2**20
_BATCH_KEYS = 1024


class _Answer(NamedTuple):
    is_there: bool
    valid_until_s: float


class MooncakeTier:
    """Mooncake Store as one tier. All clients of one master share its blocks.

    Other members may join and leave with their blocks, so a HIT is a hint: the load may end as
    MISSING or FAILED. ``num_blocks`` and ``used_bytes`` count the blocks that this tier has stored
    or loaded itself and has not found missing since. ``evict`` and ``clear`` remove blocks for all
    clients.

    Args:
        config: Configuration with which to join the store.
        clock: Monotonic clock for the age of answers, in seconds.

    Raises:
        UserError: Mooncake is not installed.
    """

    name = "mooncake"

    def __init__(
        self, config: MooncakeConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        check_installed()
        self._config = config
        self._clock = clock
        self._link = MooncakeLink(config)
        self._health = self._link.health
        self._tickets = itertools.count(1)
        self._jobs: dict[int, MooncakeJob] = {}
        self._busy: dict[bytes, int] = {}
        self._completions: list[Completion] = []
        self._answers: dict[bytes, _Answer] = {}
        self._asked: set[bytes] = set()
        self._own: dict[bytes, int] = {}
        self._own_bytes = 0
        self._counters = TierCounters()

    @staticmethod
    def check_url(url: str) -> None:
        """Check ``url`` as ``from_url`` takes it; connect to nothing.

        Raises:
            UserError: The URL is invalid.
        """
        parse_url(url)

    @classmethod
    def from_url(cls, url: str) -> MooncakeTier:
        """Join the store that ``url`` names; return before it has been reached.

        Args:
            url: ``mooncake://HOST:PORT?segment=1GiB&...``, see ``parse_url``.

        Raises:
            UserError: The URL is invalid, or Mooncake is not installed.
        """
        return cls(parse_url(url))

    @property
    def fd(self) -> int:
        """File descriptor, readable when ``poll`` or ``lookup`` may have new results."""
        return self._link.events.fd

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key by the master's valid answers; ask about unknown keys."""
        self._take_events()
        if not self._health.available:
            return [Lookup.MISS] * len(keys)
        now_s = self._clock()
        unknown: dict[bytes, None] = {}
        found: list[Lookup] = []
        for key in keys:
            answer = self._answers.get(key)
            if key in self._busy and not self._is_known(key):
                found.append(Lookup.PENDING)
            elif answer is not None and now_s < answer.valid_until_s:
                found.append(Lookup.HIT if answer.is_there else Lookup.MISS)
            elif key in self._asked:
                found.append(Lookup.PENDING)
            elif len(self._asked) + len(unknown) < _MAX_ASKED:
                unknown[key] = None
                found.append(Lookup.PENDING)
            else:
                found.append(Lookup.MISS)
        self._asked.update(unknown)
        for batch in _batches(unknown):
            self._link.orders.put(AskedKeys(batch, None))
        return found

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Begin to write a block; the store evicts others if it is full."""
        self._take_events()
        is_too_large = source.size > self._config.max_block_bytes
        if is_too_large or block.key in self._busy or self._knows(block.key, is_there=True):
            return None
        return self._submit(block.key, source, is_store=True)

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block that ``lookup`` has found, or that this tier has stored."""
        self._take_events()
        answer = self._answers.get(key)
        is_there = key in self._own if answer is None else answer.is_there
        if not is_there or self._own.get(key, target.size) != target.size:
            self._counters.missing += 1
            return None
        return self._submit(key, target, is_store=False)

    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call."""
        self._link.events.calm()
        self._take_events()
        completions, self._completions = self._completions, []
        return completions

    def clear(self) -> int:
        """Remove every block that is known to this tier and not in use; return their number."""
        self._take_events()
        known = {*self._own, *self._answers} - self._busy.keys()
        keys = [key for key in known if self._is_known(key)]
        for batch in _batches(keys):
            self._remove(batch)
        return len(keys)

    def stats(self) -> TierStats:
        """Return the current counters and gauges."""
        self._take_events()
        return self._counters.stats(
            self.name,
            available=self._health.available,
            problem=self._health.problem,
            capacity_bytes=0,
            used_bytes=self._own_bytes,
            num_blocks=len(self._own),
            in_flight=len(self._jobs),
            keeps="blocks that this store has not met since it started",
        )

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        assert len(self._jobs) <= self._config.depth
        assert sum(self._busy.values()) == len(self._jobs)
        assert all(number > 0 for number in self._busy.values())
        assert len(self._answers) <= _MAX_ANSWERS
        assert len(self._asked) <= _MAX_ASKED
        assert sum(self._own.values()) == self._own_bytes
        assert len(self._own) <= _MAX_OWN
        assert self._health.available == (not self._health.problem)

    def close(self) -> None:
        """End all transfers within the timeout and two seconds, then leave the store."""
        self._link.close()

    def _submit(self, key: bytes, memory: BlockBytes, *, is_store: bool) -> int | None:
        if not self._health.available or len(self._jobs) >= self._config.depth:
            return None
        ticket = next(self._tickets)
        now_s = time.monotonic()
        job = MooncakeJob(ticket, key, memory, is_store, now_s + self._config.timeout_s)
        self._jobs[ticket] = job
        self._busy[key] = self._busy.get(key, 0) + 1
        (self._counters.store_speed if is_store else self._counters.load_speed).begin(now_s)
        self._link.orders.put(job)
        return ticket

    def _take_events(self) -> None:
        for event in self._link.events.take():
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case MooncakeJob():
                self._on_ended(event)
            case AskedKeys(keys, codes):
                for key, code in zip(keys, codes or [0] * len(keys), strict=True):
                    # A key that is no longer in ``_asked`` has a newer answer.
                    if key in self._asked:
                        self._learn(key, is_there=bool(code))
            case Health():
                self._health = event
                if not event.available:
                    self._answers.clear()

    def _on_ended(self, job: MooncakeJob) -> None:
        assert job.outcome is not None
        del self._jobs[job.ticket]
        self._busy[job.key] -= 1
        if not self._busy[job.key]:
            del self._busy[job.key]
        num_bytes = job.memory.size
        self._completions.append(Completion(job.ticket, job.outcome))
        end = self._counters.end_store if job.is_store else self._counters.end_load
        end(time.monotonic(), num_bytes, job.outcome)
        match job.outcome:
            case TierOutcome.DONE:
                self._learn(job.key, is_there=True, num_bytes=num_bytes)
            case TierOutcome.MISSING:
                self._learn(job.key, is_there=False)
            case TierOutcome.CORRUPT:
                self._remove([job.key])
            case TierOutcome.FAILED if not job.is_store:
                # The block may be gone with its peer: do not try it again at once.
                self._learn(job.key, is_there=False)

    def _knows(self, key: bytes, *, is_there: bool) -> bool:
        answer = self._answers.get(key)
        return (
            answer is not None
            and answer.is_there == is_there
            and self._clock() < answer.valid_until_s
        )

    def _is_known(self, key: bytes) -> bool:
        return key in self._own or self._knows(key, is_there=True)

    def _learn(self, key: bytes, *, is_there: bool, num_bytes: int = 0) -> None:
        self._asked.discard(key)
        self._answers.pop(key, None)
        valid_s = _HIT_VALID_S if is_there else _MISS_VALID_S
        self._answers[key] = _Answer(is_there, self._clock() + valid_s)
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        if num_bytes or not is_there:
            self._own_bytes -= self._own.pop(key, 0)
        if num_bytes:
            self._own[key] = num_bytes
            self._own_bytes += num_bytes
        if len(self._own) > _MAX_OWN:
            self._own_bytes -= self._own.pop(next(iter(self._own)))

    def _remove(self, keys: list[bytes]) -> None:
        for key in keys:
            self._learn(key, is_there=False)
        self._link.orders.put(Removed(keys))


def _batches(keys: Sequence[bytes] | dict[bytes, None]) -> list[list[bytes]]:
    listed = list(keys)
    return [listed[i : i + _BATCH_KEYS] for i in range(0, len(listed), _BATCH_KEYS)]
