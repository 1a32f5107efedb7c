"""Which block goes first: least recently used, children before parents."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

from banaserve.kvstore.records import Entry

_FEW = 64


class Chains:
    """Who names whom as a parent.

    Children are counted by the parent's key, whether or not the parent is in the index, so that a
    parent that comes back after its children is protected from its first moment on.
    """

    def __init__(self, entries: Mapping[bytes, Entry]) -> None:
        self.num_children: dict[bytes, int] = {}
        self._entries = entries

    def link(self, parent: bytes | None) -> None:
        """One more child of ``parent``."""
        if parent is not None:
            self.num_children[parent] = self.num_children.get(parent, 0) + 1

    def unlink(self, parent: bytes | None) -> Entry | None:
        """One child less; the parent's entry where that was its last."""
        if parent is None:
            return None
        self.num_children[parent] -= 1
        if self.num_children[parent]:
            return None
        del self.num_children[parent]
        return self._entries.get(parent)

    def closes_a_cycle(self, key: bytes, parent: bytes) -> bool:
        """Whether ``key`` is an ancestor of ``parent``: such blocks could never be evicted.

        Hash chains have no cycles, but a faulty client can send one. The walk is rare: only a key
        that comes back while children wait for it is followed.
        """
        if key == parent:
            return True
        ancestor: bytes | None = parent if key in self.num_children else None
        while ancestor is not None and ancestor != key:
            entry = self._entries.get(ancestor)
            ancestor = entry.parent if entry is not None else None
        return ancestor is not None

    def is_evictable(self, entry: Entry) -> bool:
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
        self._heap: list[tuple[int, int, Entry]] = []
        self._queued: set[int] = set()

    def offer(self, entry: Entry) -> None:
        """Queue ``entry`` if it is evictable."""
        if entry.serial not in self._queued and self._chains.is_evictable(entry):
            self._queued.add(entry.serial)
            heappush(self._heap, (entry.last_used, entry.serial, entry))

    def forget(self, entry: Entry) -> None:
        """``entry`` has left the index."""
        self._queued.discard(entry.serial)
        if len(self._heap) > 2 * len(self._queued) + _FEW:
            self._heap = [item for item in self._heap if item[1] in self._queued]
            heapify(self._heap)

    def pop(self) -> Entry | None:
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

    def check(self, entries: Mapping[bytes, Entry], tenant: bytes | None = None) -> None:
        """Assert that exactly the entries of the index are queued that must be."""
        live = [item[2] for item in self._heap if item[1] in self._queued]
        assert len(live) == len(self._queued), "an entry is queued twice, or a shell is counted"
        assert all(entries.get(entry.key) is entry for entry in live)
        for entry in entries.values():
            if self._chains.is_evictable(entry) and tenant in (None, entry.tenant):
                assert entry.serial in self._queued, "an evictable entry is not queued"
