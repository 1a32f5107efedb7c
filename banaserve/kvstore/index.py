"""The store's index: which key lies in which slot, who may read it, who writes it. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from banaserve.kvstore.index_check import check_index
from banaserve.kvstore.records import Grant, IndexEntry, Owned, SlotWatcher, StoreCounters
from banaserve.kvstore.slot_table import SlotTable


class BlockIndex(SlotTable):
    """Slots with leases for readers and reservations for writers, each held by an owner.

    Args:
        num_slots: Slots in the pool.
        watcher: Told what becomes of slots.
        counters: To count on with; new ones by default.
        tenant_quota: Largest share of the slots that one tenant may use; 1 sets no limit.
        is_intact: Asked before a READY block is leased or copied; one that is not is dropped.
    """

    def __init__(
        self,
        num_slots: int,
        watcher: SlotWatcher | None = None,
        counters: StoreCounters | None = None,
        tenant_quota: float = 1.0,
        is_intact: Callable[[IndexEntry], bool] | None = None,
    ) -> None:
        super().__init__(num_slots, watcher, counters, tenant_quota, is_intact)
        self.num_leased = 0
        self._writing: dict[int, IndexEntry] = {}
        self._leases: dict[int, Grant] = {}
        self._owned: dict[int, Owned] = {}
        self._last_lease_id = 0

    @property
    def num_writing(self) -> int:
        """Slots that clients are writing."""
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

    # ---- leases

    def acquire(self, keys: Sequence[bytes], owner: int) -> Grant | None:
        """Lease what ``find`` finds of ``keys`` to ``owner``; None where that is nothing."""
        entries = self.find(keys)
        self.counters.misses += len(keys)
        return self.lease(entries, owner) if entries else None

    def lease(self, entries: Sequence[IndexEntry], owner: int) -> Grant:
        """Lease ``entries``, which are of this index, to ``owner``."""
        self._last_lease_id += 1
        grant = Grant(self._last_lease_id, owner, [])
        self._leases[grant.lease_id] = grant
        self._owned.setdefault(owner, Owned()).lease_ids.add(grant.lease_id)
        self._tick += 1
        self.extend(grant, entries)
        return grant

    def extend(self, grant: Grant, entries: Sequence[IndexEntry]) -> None:
        """Let a lease cover further ``entries``."""
        num_ready = 0
        for entry in entries:
            self.num_leased += entry.num_leases == 0
            entry.num_leases += 1
            entry.last_used = self._tick
            num_ready += entry.ready
        grant.entries.extend(entries)
        # What a promotion brings was not readable when it was asked for.
        self.counters.hits += num_ready
        self.counters.misses -= num_ready

    def release(self, lease_id: int) -> bool:
        """End a lease. False where there is no such lease (any more)."""
        grant = self._leases.pop(lease_id, None)
        if grant is None:
            return False
        for entry in grant.entries:
            entry.num_leases -= 1
            if entry.num_leases == 0:
                self.num_leased -= 1
                self._settle(entry)
        self._owned[grant.owner].lease_ids.discard(lease_id)
        self._forget_owner_if_idle(grant.owner)
        return True

    # ---- writing

    def reserve(
        self,
        key: bytes,
        parent: bytes | None,
        owner: int,
        num_parts: int = 1,
        tenant: bytes = b"",
    ) -> tuple[int, int] | None:
        """Make ``key`` WRITING for ``owner``, evicting a block where no slot may be had otherwise.

        Returns:
            The slot as (index, serial); None where the key is in the index already, every slot is
            in use, or the tenant is over its quota and has nothing to evict.
        """
        entry = self._add(key, parent, tenant)
        if entry is None:
            return None
        entry.owner, entry.num_parts = owner, num_parts
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

    def check(self) -> None:
        """Assert what must hold between two operations."""
        check_index(self)

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
                self.counters.commits += 1
                self._publish(entry)
                self._settle(entry)
        return True

    def _end_writing(self, entry: IndexEntry) -> None:
        del self._writing[entry.serial]
        self._owned[entry.owner].serials.discard(entry.serial)
        self._forget_owner_if_idle(entry.owner)

    def _forget_owner_if_idle(self, owner: int) -> None:
        owned = self._owned[owner]
        if not owned.lease_ids and not owned.serials:
            del self._owned[owner]
