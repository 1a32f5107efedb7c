"""Smallest possible tier: blocks in a dictionary. Copy it to begin a tier of your own.

What a tier has to do, and where to see it here:

1. Answer ``lookup`` from memory, and begin loads and stores without waiting for them. A real tier
   hands them to a thread, an I/O ring or a peer; here the bytes are copied when ``poll`` is called.
2. Make ``fd`` readable when something has ended, so that the daemon calls ``poll``: an eventfd.
3. Bound what is under way, and say None beyond that. The caller tries again, or drops the block.
4. Count, and keep to the budget: children before parents, least recently used first, which
   ``ChainedBlocks`` does.
5. Verify what comes from outside the process (disk, network) against a checksum, off this thread.
   Here nothing does.

Users ask for it by a URL: ``check_url`` refuses one that makes no sense, ``from_url`` opens the
tier. Then add the tier to the contract suite in ``tests/kvstore/test_tiers.py``: one line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from banaserve.base.errors import UserError
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.sizes import parse_size
from banaserve.kvstore.tiers.chains import ChainedBlock, ChainedBlocks
from banaserve.kvstore.tiers.counters import TierCounters
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    TierOutcome,
    TierStats,
)


class StoredBlock(ChainedBlock):
    """A block and its bytes, which are None while it is being written."""

    __slots__ = ("data", "num_bytes")

    def __init__(self, name: BlockName, num_bytes: int) -> None:
        super().__init__(name.key, name.parent)
        self.num_bytes = num_bytes
        self.data: BlockBytes | None = None


@dataclass(slots=True)
class Transfer:
    """A load or a store under way; ``memory`` is the caller's until its completion."""

    ticket: int
    block: StoredBlock
    memory: BlockBytes
    is_store: bool


class DictionaryTier:
    """A tier in the daemon's own memory; see ``StoreTier`` and ``UrlTier``.

    Args:
        capacity_bytes: For the bytes of blocks.
        queue_depth: Loads and stores at a time.
        now: Seconds of a monotonic clock.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        queue_depth: int = 16,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._queue_depth = queue_depth
        self._now = now
        self._used_bytes = 0
        self._blocks: ChainedBlocks[StoredBlock] = ChainedBlocks()
        self._counters = TierCounters()
        self._under_way: list[Transfer] = []
        self._last_ticket = 0
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @classmethod
    def check_url(cls, url: str) -> None:
        """Return if ``url`` is ``dictionary://?size=SIZE``.

        Raises:
            UserError: It is not.
        """
        _capacity_bytes(url)

    @classmethod
    def from_url(cls, url: str) -> DictionaryTier:
        """The open tier that a checked URL stands for."""
        return cls(_capacity_bytes(url))

    @property
    def name(self) -> str:
        return "dictionary"

    @property
    def fd(self) -> int:
        return self._event_fd

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key; a block that is being written is PENDING."""
        blocks = map(self._blocks.get, keys)
        return [
            Lookup.MISS if block is None else Lookup.PENDING if block.data is None else Lookup.HIT
            for block in blocks
        ]

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Begin to write a block; see ``StoreTier``."""
        if len(self._under_way) >= self._queue_depth or self._blocks.get(block.key) is not None:
            return None
        if source.nbytes > self._capacity_bytes:
            return None
        stored = StoredBlock(block, source.nbytes)
        # Added first: it keeps its parent from being the one that goes.
        self._blocks.add(stored)
        self._blocks.begin_use(stored)
        self._used_bytes += stored.num_bytes
        if not self._make_room():
            self._forget(stored)
            return None
        self._counters.store_speed.begin(self._now())
        return self._begin(stored, source, is_store=True)

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block; see ``StoreTier``."""
        block = self._blocks.get(key)
        if block is None or block.data is None or block.num_bytes != target.nbytes:
            self._counters.missing += 1
            return None
        if len(self._under_way) >= self._queue_depth:
            return None
        self._blocks.touch(block)
        self._blocks.begin_use(block)
        self._counters.load_speed.begin(self._now())
        return self._begin(block, target, is_store=False)

    def poll(self) -> list[Completion]:
        """Do what is under way, all at once."""
        if self._under_way:
            os.eventfd_read(self._event_fd)
        transfers, self._under_way = self._under_way, []
        return [self._end(transfer) for transfer in transfers]

    def clear(self) -> int:
        """Forget every block that is not being read or written; how many went."""
        idle = [block for block in self._blocks if not block.num_users]
        for block in idle:
            self._forget(block)
        return len(idle)

    def stats(self) -> TierStats:
        """Counters and gauges of this moment."""
        num_written = sum(transfer.is_store for transfer in self._under_way)
        return self._counters.stats(
            self.name,
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._used_bytes,
            num_blocks=len(self._blocks) - num_written,
            in_flight=len(self._under_way),
        )

    def check(self) -> None:
        """Assert what must hold between two calls."""
        self._blocks.check()
        assert self._used_bytes == sum(block.num_bytes for block in self._blocks)
        assert self._used_bytes <= self._capacity_bytes
        assert sum(block.num_users for block in self._blocks) == len(self._under_way)
        written = {id(transfer.block) for transfer in self._under_way if transfer.is_store}
        assert written == {id(block) for block in self._blocks if block.data is None}
        assert len(self._under_way) <= self._queue_depth

    def close(self) -> None:
        """Finish what is under way, then let go of everything."""
        self.poll()
        os.close(self._event_fd)

    def _begin(self, block: StoredBlock, memory: BlockBytes, *, is_store: bool) -> int:
        self._last_ticket += 1
        self._under_way.append(Transfer(self._last_ticket, block, memory, is_store))
        os.eventfd_write(self._event_fd, 1)
        return self._last_ticket

    def _end(self, transfer: Transfer) -> Completion:
        block = transfer.block
        if transfer.is_store:
            block.data = transfer.memory.copy()
        else:
            assert block.data is not None
            transfer.memory[:] = block.data
        self._blocks.end_use(block)
        end = self._counters.end_store if transfer.is_store else self._counters.end_load
        end(self._now(), block.num_bytes, TierOutcome.DONE)
        return Completion(transfer.ticket, TierOutcome.DONE)

    def _make_room(self) -> bool:
        while self._used_bytes > self._capacity_bytes:
            victim = self._blocks.pop_victim()
            if victim is None:
                return False
            self._used_bytes -= victim.num_bytes
            self._counters.evictions += 1
        return True

    def _forget(self, block: StoredBlock) -> None:
        self._blocks.remove(block)
        self._used_bytes -= block.num_bytes


def _capacity_bytes(url: str) -> int:
    query = parse_qs(urlsplit(url).query)
    if set(query) != {"size"}:
        raise UserError(f"{url}: write dictionary://?size=256MiB")
    return parse_size(query["size"][0])
