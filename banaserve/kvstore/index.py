"""The store's index: which key lies in which slot, who may read it, who writes it. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.records import Counters, Entry, Grant, HeldLease, Owned


class BlockIndex:
    """Keys, slots, leases and reservations of one pool.

    Blocks form chains: a block may be evicted only when it is READY, no lease covers it and no
    block that names it as its parent is in the index. Among those the one that was acquired or
    committed longest ago goes first. Every operation costs O(log n) for each key.

    Args:
        num_slots: Slots in the pool.
        on_free: Called with a slot's index each time it becomes free.
        counters: To count on with; new ones by default.
    """

    def __init__(
        self,
        num_slots: int,
        on_free: Callable[[int], None] | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.num_leased = 0
        self.counters = counters or Counters()
        self._on_free = on_free
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, Entry] = {}
        # Counted by the parent's key, whether or not the parent is in the index, so that a parent
        # that comes back after its children is protected from its first moment on.
        self._num_children: dict[bytes, int] = {}
        self._writing: dict[int, Entry] = {}
        self._leases: dict[int, HeldLease] = {}
        self._owned: dict[int, Owned] = {}
        # Every evictable entry is in here exactly once. An entry that was used again, or stopped
        # being evictable, is put right when it comes up, so the heap never outgrows the index.
        self._queue: list[tuple[int, int, Entry]] = []
        self._tick = 0
        self._last_serial = 0
        self._last_lease_id = 0

    @property
    def num_used(self) -> int:
        """Slots that hold a block or are being written."""
        return len(self._entries)

    @property
    def num_writing(self) -> int:
        """Slots that are being written."""
        return len(self._writing)

    @property
    def num_leases(self) -> int:
        """Leases held."""
        return len(self._leases)

    @property
    def has_owners(self) -> bool:
        """Whether anybody holds a lease or a reservation."""
        return bool(self._owned)

    def num_writing_of(self, owner: int) -> int:
        """Slots that ``owner`` has reserved and that are still being written."""
        return len(self._owned[owner].serials) if owner in self._owned else 0

    def owns_any(self, owner: int) -> bool:
        """Whether ``owner`` holds a lease or a reservation."""
        return owner in self._owned

    def lookup(self, keys: Iterable[bytes]) -> list[Lookup]:
        """What is known of each key. Changes nothing, not even the order of eviction."""
        miss, hit, pending = Lookup.MISS, Lookup.HIT, Lookup.PENDING
        entries = map(self._entries.get, keys)
        return [miss if entry is None else hit if entry.ready else pending for entry in entries]

    def acquire(self, keys: Sequence[bytes], owner: int) -> Grant | None:
        """Lease the longest READY prefix of ``keys`` to ``owner``; None where it is empty."""
        entries: list[Entry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not entry.ready:
                break
            entries.append(entry)
        self.counters.hits += len(entries)
        self.counters.misses += len(keys) - len(entries)
        if not entries:
            return None
        self._tick += 1
        for entry in entries:
            self.num_leased += entry.num_leases == 0
            entry.num_leases += 1
            entry.last_used = self._tick
        self._last_lease_id += 1
        self._leases[self._last_lease_id] = HeldLease(owner, entries)
        self._owned.setdefault(owner, Owned()).lease_ids.add(self._last_lease_id)
        return Grant(self._last_lease_id, [(entry.slot, entry.serial) for entry in entries])

    def release(self, lease_id: int) -> bool:
        """End a lease. False where there is no such lease (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        for entry in lease.entries:
            entry.num_leases -= 1
            if entry.num_leases == 0:
                self.num_leased -= 1
                self._enqueue_if_evictable(entry)
        self._owned[lease.owner].lease_ids.discard(lease_id)
        self._forget_owner_if_idle(lease.owner)
        return True

    def reserve(
        self, key: bytes, parent: bytes | None, owner: int, num_parts: int = 1
    ) -> tuple[int, int] | None:
        """Make ``key`` WRITING for ``owner``, evicting a block where the pool is full.

        Returns:
            The slot as (index, serial); None where the key is in the index already or every slot
            is in use.
        """
        if key in self._entries:
            return None
        if parent is not None and self._closes_a_cycle(key, parent):
            parent = None
        # The link comes first: it keeps the parent from being the one that is evicted.
        self._link(parent)
        if not self._free:
            if not self._evict():
                self._unlink(parent)
                return None
            self.counters.evictions += 1
        self._last_serial += 1
        entry = Entry(key, parent, self._free.pop(), self._last_serial, owner, num_parts)
        self._entries[key] = entry
        self._writing[entry.serial] = entry
        self._owned.setdefault(owner, Owned()).serials.add(entry.serial)
        return entry.slot, entry.serial

    def commit(self, serial: int, part: int) -> bool:
        """Say that ``part`` of a reservation is written; READY after the last part.

        Returns:
            False where the reservation is gone, or this part has ended before.
        """
        return self._end_part(serial, part, failed=False)

    def abandon(self, serial: int, part: int | None = None) -> bool:
        """Give a reservation back, for all parts at once where ``part`` is None.

        With a part the slot is freed only after every part has ended: until then the others may
        still be writing there.

        Returns:
            False where the reservation is gone, or this part has ended before.
        """
        if part is not None:
            return self._end_part(serial, part, failed=True)
        entry = self._writing.get(serial)
        if entry is None:
            return False
        self._end_writing(entry)
        self._remove(entry)
        return True

    def drop_owner(self, owner: int) -> None:
        """End everything that ``owner`` holds: leases are released, reservations freed."""
        owned = self._owned.get(owner)
        if owned is None:
            return
        for lease_id in tuple(owned.lease_ids):
            self.release(lease_id)
        for serial in tuple(owned.serials):
            self.abandon(serial)

    def clear(self) -> int:
        """Drop every block that neither is in use nor has a descendant in use; how many went."""
        num_dropped = 0
        while self._evict():
            num_dropped += 1
        return num_dropped

    def check(self) -> None:
        """Assert what must hold between two operations."""
        entries = self._entries
        slots = sorted(self._free + [entry.slot for entry in entries.values()])
        assert slots == list(range(self.num_slots)), "a slot is lost or used twice"
        parents = [entry.parent for entry in entries.values() if entry.parent is not None]
        assert Counter(parents) == self._num_children
        for key, entry in entries.items():
            assert entry.key == key
            assert (entry.serial in self._writing) is not entry.ready
            assert entry.ready or not entry.num_leases, "a lease on a block that is being written"
        leased = [entry for lease in self._leases.values() for entry in lease.entries]
        assert all(entries.get(entry.key) is entry for entry in leased), "a leased block is gone"
        assert self.num_leased == len({entry.key for entry in leased})
        assert len(leased) == sum(entry.num_leases for entry in entries.values())
        queued = [entry for _, _, entry in self._queue]
        assert all(entry.queued and entries.get(entry.key) is entry for entry in queued)
        assert len(queued) == sum(entry.queued for entry in entries.values())
        assert all(entry.queued for entry in entries.values() if self._is_evictable(entry))
        assert all(owned.lease_ids or owned.serials for owned in self._owned.values())
        for owner, owned in self._owned.items():
            assert all(self._leases[lease_id].owner == owner for lease_id in owned.lease_ids)
            assert all(self._writing[serial].owner == owner for serial in owned.serials)
        assert len(self._leases) == sum(len(owned.lease_ids) for owned in self._owned.values())
        assert len(self._writing) == sum(len(owned.serials) for owned in self._owned.values())

    def _end_part(self, serial: int, part: int, *, failed: bool) -> bool:
        entry = self._writing.get(serial)
        if entry is None or not 0 <= part < entry.num_parts or entry.ended_parts >> part & 1:
            return False
        entry.ended_parts |= 1 << part
        entry.failed |= failed
        if entry.ended_parts == (1 << entry.num_parts) - 1:
            self._end_writing(entry)
            if entry.failed:
                self._remove(entry)
            else:
                self._publish(entry)
        return True

    def _end_writing(self, entry: Entry) -> None:
        del self._writing[entry.serial]
        self._owned[entry.owner].serials.discard(entry.serial)
        self._forget_owner_if_idle(entry.owner)

    def _publish(self, entry: Entry) -> None:
        self._tick += 1
        entry.ready = True
        entry.last_used = self._tick
        self.counters.commits += 1
        self._enqueue_if_evictable(entry)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._free.append(entry.slot)
        if self._on_free is not None:
            self._on_free(entry.slot)
        self._unlink(entry.parent)

    def _evict(self) -> bool:
        while self._queue:
            last_used, _, entry = heappop(self._queue)
            entry.queued = False
            if entry.last_used != last_used:
                self._enqueue_if_evictable(entry)
            elif self._is_evictable(entry):
                self._remove(entry)
                return True
        return False

    def _is_evictable(self, entry: Entry) -> bool:
        return entry.ready and not entry.num_leases and entry.key not in self._num_children

    def _enqueue_if_evictable(self, entry: Entry) -> None:
        if not entry.queued and self._is_evictable(entry):
            entry.queued = True
            heappush(self._queue, (entry.last_used, entry.serial, entry))

    def _link(self, parent: bytes | None) -> None:
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _unlink(self, parent: bytes | None) -> None:
        if parent is None:
            return
        self._num_children[parent] -= 1
        if not self._num_children[parent]:
            del self._num_children[parent]
            entry = self._entries.get(parent)
            if entry is not None:
                self._enqueue_if_evictable(entry)

    def _closes_a_cycle(self, key: bytes, parent: bytes) -> bool:
        """Whether ``key`` is an ancestor of ``parent``: such blocks could never be evicted.

        Hash chains have no cycles, but a faulty client can send one. The walk is rare: only a key
        that comes back while children wait for it is followed.
        """
        if key == parent:
            return True
        ancestor: bytes | None = parent if key in self._num_children else None
        while ancestor is not None and ancestor != key:
            entry = self._entries.get(ancestor)
            ancestor = entry.parent if entry is not None else None
        return ancestor is not None

    def _forget_owner_if_idle(self, owner: int) -> None:
        owned = self._owned[owner]
        if not owned.lease_ids and not owned.serials:
            del self._owned[owner]
