"""Order of eviction: least recently used first, children before parents, a quota for each tenant.

Blocks form chains: each block may name another as its parent. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from banaserve.kvstore.index.records import IndexEntry

_FEW = 64


class ChainEntry(Protocol):
    """Entry of a key that may name another key as its parent.

    Attributes:
        last_used: Tick of the last use: of two evictable entries, that with the smaller one goes.
        serial: Number of the entry, unique among all that were ever in one place.
    """

    key: bytes
    parent: bytes | None
    last_used: int
    serial: int


EntryT = TypeVar("EntryT", bound=ChainEntry)


class Parents(Generic[EntryT]):
    """Numbers of children by the parent's key, whether or not the parent has an entry.

    Therefore a parent that is added after its children is protected from its first moment on.

    Args:
        entries: All entries by key; only read.
    """

    def __init__(self, entries: Mapping[bytes, EntryT]) -> None:
        self.num_children: dict[bytes, int] = {}
        self._entries = entries

    def link(self, parent: bytes | None) -> None:
        """Count one more child of ``parent``."""
        if parent is not None:
            self.num_children[parent] = self.num_children.get(parent, 0) + 1

    def unlink(self, parent: bytes | None) -> EntryT | None:
        """Count one child less; return the parent's entry if that was its last child."""
        if parent is None:
            return None
        self.num_children[parent] -= 1
        if self.num_children[parent]:
            return None
        del self.num_children[parent]
        return self._entries.get(parent)

    def closes_a_cycle(self, key: bytes, parent: bytes) -> bool:
        """Return whether ``key`` is an ancestor of ``parent``: such blocks could never be evicted.

        Hash chains have no cycles, but a faulty client or a damaged disk can cause one. The walk
        is rare: it is needed only for a key that is added after its children.
        """
        if key == parent:
            return True
        ancestor: bytes | None = parent if key in self.num_children else None
        while ancestor is not None and ancestor != key:
            entry = self._entries.get(ancestor)
            ancestor = entry.parent if entry is not None else None
        return ancestor is not None


class EvictionQueue(Generic[EntryT]):
    """Entries in the order of their last use.

    Every evictable entry is queued exactly once. An entry that was used again, or is no longer
    evictable, is corrected when it reaches the front; an entry that has left the index stays in
    the heap as a shell until shells are the majority, so the heap has at most about twice as many
    items as queued entries.

    Args:
        is_evictable: Function that returns whether an entry may be evicted now.
    """

    def __init__(self, is_evictable: Callable[[EntryT], bool]) -> None:
        self._is_evictable = is_evictable
        self._heap: list[tuple[int, int, EntryT]] = []
        self._queued: set[int] = set()

    def offer(self, entry: EntryT) -> None:
        """Queue ``entry`` if it is evictable."""
        if entry.serial not in self._queued and self._is_evictable(entry):
            self._queued.add(entry.serial)
            heappush(self._heap, (entry.last_used, entry.serial, entry))

    def forget(self, entry: EntryT) -> None:
        """Remove ``entry``, which is gone, from the queue."""
        self._queued.discard(entry.serial)
        if len(self._heap) > 2 * len(self._queued) + _FEW:
            self._heap = [item for item in self._heap if item[1] in self._queued]
            heapify(self._heap)

    def pop(self) -> EntryT | None:
        """Remove and return the evictable entry that was used longest ago; None if none is."""
        while self._heap:
            last_used, serial, entry = heappop(self._heap)
            if serial not in self._queued:
                continue
            self._queued.remove(serial)
            if entry.last_used != last_used:
                self.offer(entry)
            elif self._is_evictable(entry):
                return entry
        return None

    def check(self, entries: Mapping[bytes, EntryT], offered: Iterable[EntryT]) -> None:
        """Assert that only ``entries`` are queued, and all of ``offered`` that are evictable."""
        live = [item[2] for item in self._heap if item[1] in self._queued]
        assert len(live) == len(self._queued), "an entry is queued twice, or a shell is counted"
        assert all(entries.get(entry.key) is entry for entry in live)
        for entry in offered:
            assert not self._is_evictable(entry) or entry.serial in self._queued, "not queued"


class Tenants:
    """Slots in use by tenant. Only tenants that use a slot are remembered.

    ``quota_fraction`` is the largest share of the slots that one tenant may use; 1 sets no limit.
    """

    def __init__(
        self,
        is_evictable: Callable[[IndexEntry], bool],
        num_slots: int,
        quota_fraction: float = 1.0,
    ) -> None:
        self.has_quota = quota_fraction < 1.0
        self.quota_slots = max(1, int(num_slots * quota_fraction)) if self.has_quota else num_slots
        self._is_evictable = is_evictable
        self._num_slots: dict[bytes, int] = {}
        self._queues: dict[bytes, EvictionQueue[IndexEntry]] = {}

    def __len__(self) -> int:
        return len(self._num_slots)

    def is_full(self, tenant: bytes) -> bool:
        """Return whether ``tenant`` has reached its quota."""
        return self.has_quota and self._num_slots.get(tenant, 0) >= self.quota_slots

    def add(self, tenant: bytes) -> None:
        """Count one more slot of ``tenant``."""
        self._num_slots[tenant] = self._num_slots.get(tenant, 0) + 1
        if self.has_quota and tenant not in self._queues:
            self._queues[tenant] = EvictionQueue(self._is_evictable)

    def remove(self, tenant: bytes) -> None:
        """Count one slot less of ``tenant``."""
        self._num_slots[tenant] -= 1
        if not self._num_slots[tenant]:
            del self._num_slots[tenant]
            self._queues.pop(tenant, None)

    def offer(self, entry: IndexEntry) -> None:
        """Queue ``entry`` for its tenant if it is evictable."""
        if self.has_quota:
            self._queues[entry.tenant].offer(entry)

    def forget(self, entry: IndexEntry) -> None:
        """Remove ``entry``, which has left the index, from its tenant's queue."""
        if self.has_quota:
            self._queues[entry.tenant].forget(entry)

    def pop(self, tenant: bytes) -> IndexEntry | None:
        """Remove and return the evictable block of ``tenant`` that was used longest ago."""
        return self._queues[tenant].pop()
