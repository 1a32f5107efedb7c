"""Which block goes first: least recently used, children before parents."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from banaserve.kvstore.parents import Parents
from banaserve.kvstore.records import IndexEntry

_FEW = 64


class Chains(Parents[IndexEntry]):
    """Which entries of the index hang on which, and which of them may go."""

    def is_evictable(self, entry: IndexEntry) -> bool:
        """Whether ``entry`` is READY, nobody uses it and no block names it as its parent."""
        return (
            entry.ready
            and not entry.num_leases
            and not entry.num_pins
            and entry.key not in self.num_children
        )


class EvictionQueue:
    """Entries in the order of their last use.

    Every evictable entry is in here exactly once. An entry that was used again, or stopped being
    evictable, is put right when it comes up; one that has left the index stays as a shell until
    shells are the majority, so the heap never outgrows the index by more than twice.
    """

    def __init__(self, chains: Chains) -> None:
        self._chains = chains
        self._heap: list[tuple[int, int, IndexEntry]] = []
        self._queued: set[int] = set()

    def offer(self, entry: IndexEntry) -> None:
        """Queue ``entry`` if it is evictable."""
        if entry.serial not in self._queued and self._chains.is_evictable(entry):
            self._queued.add(entry.serial)
            heappush(self._heap, (entry.last_used, entry.serial, entry))

    def forget(self, entry: IndexEntry) -> None:
        """``entry`` has left the index."""
        self._queued.discard(entry.serial)
        if len(self._heap) > 2 * len(self._queued) + _FEW:
            self._heap = [item for item in self._heap if item[1] in self._queued]
            heapify(self._heap)

    def pop(self) -> IndexEntry | None:
        """The evictable entry that was used longest ago; it is queued no more."""
        while self._heap:
            last_used, serial, entry = heappop(self._heap)
            if serial not in self._queued:
                continue
            self._queued.remove(serial)
            if entry.last_used != last_used:
                self.offer(entry)
            elif self._chains.is_evictable(entry):
                return entry
        return None

    def check(self, entries: Mapping[bytes, IndexEntry], tenant: bytes | None = None) -> None:
        """Assert that exactly the entries of the index are queued that must be."""
        live = [item[2] for item in self._heap if item[1] in self._queued]
        assert len(live) == len(self._queued), "an entry is queued twice, or a shell is counted"
        assert all(entries.get(entry.key) is entry for entry in live)
        for entry in entries.values():
            if self._chains.is_evictable(entry) and tenant in (None, entry.tenant):
                assert entry.serial in self._queued, "an evictable entry is not queued"
