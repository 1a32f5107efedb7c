"""Blocks and the slots they lie in: states, eviction, copies to and from tiers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from banaserve.kvstore.eviction import Chains, EvictionQueue
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.records import IndexEntry, SlotWatcher, StoreCounters
from banaserve.kvstore.tenants import Tenants


class SlotTable:
    """Every slot is free, or holds one entry that is in the table or was dropped from it.

    Blocks form chains: a block may be evicted only when it is READY, nobody leases or copies it
    and no block that names it as its parent is in the table. Among those the one that was acquired
    or committed longest ago goes first. Every operation costs O(log n) for each key.

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
        self.num_slots = num_slots
        self.num_promoting = 0
        self.counters = counters or StoreCounters()
        self._watcher = watcher
        self._is_intact = is_intact
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, IndexEntry] = {}
        # Out of the table while a lease or a copy still uses the slot, by serial.
        self._dropped: dict[int, IndexEntry] = {}
        self._chains = Chains(self._entries)
        self._queue = EvictionQueue(self._chains)
        self._tenants = Tenants(self._chains, num_slots, tenant_quota)
        self._tick = 0
        self._last_serial = 0

    @property
    def num_used(self) -> int:
        """Slots that hold a block, are being filled, or are still read after their block went."""
        return len(self._entries) + len(self._dropped)

    @property
    def num_tenants(self) -> int:
        """Tenants that use at least one slot."""
        return len(self._tenants)

    def get(self, key: bytes) -> IndexEntry | None:
        """The entry of ``key``, whatever its state."""
        return self._entries.get(key)

    def lookup(self, keys: Iterable[bytes]) -> list[Lookup]:
        """What is known of each key. Changes nothing, not even the order of eviction."""
        miss, hit, pending = Lookup.MISS, Lookup.HIT, Lookup.PENDING
        entries = map(self._entries.get, keys)
        return [miss if entry is None else hit if entry.ready else pending for entry in entries]

    def find(self, keys: Sequence[bytes]) -> list[IndexEntry]:
        """The longest prefix of ``keys`` that is READY and intact, or on its way up."""
        entries: list[IndexEntry] = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or not (entry.ready or entry.promoting):
                break
            if self._is_intact is not None and not self.verify(entry):
                break
            entries.append(entry)
        return entries

    def verify(self, entry: IndexEntry) -> bool:
        """Whether the bytes of ``entry`` are what they were; dropped where they are not."""
        if self._is_intact is None or not entry.ready or self._is_intact(entry):
            return True
        self.drop(entry)
        return False

    # ---- copies between slots and tiers

    def promote(self, key: bytes, parent: bytes | None, tenant: bytes = b"") -> IndexEntry | None:
        """Give ``key`` a slot that a tier fills; pinned until ``end_promotion``.

        Returns:
            The entry; None as for ``reserve``.
        """
        entry = self._add(key, parent, tenant)
        if entry is None:
            return None
        entry.promoting = True
        entry.num_pins = 1
        entry.last_used = self._tick
        self.num_promoting += 1
        if self._watcher is not None:
            self._watcher.became_pending(entry)
        return entry

    def end_promotion(self, entry: IndexEntry, *, filled: bool) -> None:
        """Nothing writes to the slot any more: READY where it is ``filled``, else dropped."""
        if entry.promoting:
            if filled:
                self._stop_promoting(entry)
                self._publish(entry)
            else:
                self.drop(entry)
        self.unpin(entry)

    def pin(self, entry: IndexEntry) -> None:
        """Keep the slot's bytes where they are until ``unpin``."""
        entry.num_pins += 1

    def unpin(self, entry: IndexEntry) -> None:
        """One copy less is under way."""
        entry.num_pins -= 1
        self._settle(entry)

    def drop(self, entry: IndexEntry) -> None:
        """Forget a block that is READY or promoting: its bytes are wrong or will not come.

        The slot is free once the last lease and the last copy have ended.
        """
        if self._watcher is not None:
            self._watcher.failed(entry)
        if entry.promoting:
            self._stop_promoting(entry)
        entry.ready = False
        self._remove(entry)

    def clear(self) -> int:
        """Drop every block that neither is in use nor has a descendant in use; how many went."""
        num_dropped = 0
        while (entry := self._queue.pop()) is not None:
            self._remove(entry)
            num_dropped += 1
        return num_dropped

    # ---- one step of the above

    def _add(self, key: bytes, parent: bytes | None, tenant: bytes) -> IndexEntry | None:
        if key in self._entries:
            return None
        if parent is not None and self._chains.closes_a_cycle(key, parent):
            parent = None
        # The link comes first: it keeps the parent from being the one that is evicted.
        self._chains.link(parent)
        if not self._make_room(tenant):
            self._unlink(parent)
            return None
        self._last_serial += 1
        entry = IndexEntry(key, parent, self._free.pop(), self._last_serial, tenant)
        self._entries[key] = entry
        self._tenants.add(tenant)
        return entry

    def _make_room(self, tenant: bytes) -> bool:
        counters = self.counters
        if self._tenants.is_full(tenant):
            entry = self._tenants.pop(tenant)
            counters.quota_refusals += entry is None
            counters.quota_evictions += entry is not None
        elif self._free:
            return True
        else:
            entry = self._queue.pop()
        if entry is None:
            return False
        counters.evictions += 1
        self._remove(entry)
        return True

    def _stop_promoting(self, entry: IndexEntry) -> None:
        entry.promoting = False
        self.num_promoting -= 1

    def _publish(self, entry: IndexEntry) -> None:
        self._tick += 1
        entry.ready = True
        entry.last_used = self._tick
        if self._watcher is not None:
            self._watcher.became_ready(entry)

    def _settle(self, entry: IndexEntry) -> None:
        """Somebody has stopped using ``entry``."""
        if not entry.dropped:
            self._offer(entry)
        elif not entry.num_leases and not entry.num_pins:
            del self._dropped[entry.serial]
            self._free_slot(entry)

    def _remove(self, entry: IndexEntry) -> None:
        del self._entries[entry.key]
        self._queue.forget(entry)
        self._tenants.forget(entry)
        self._unlink(entry.parent)
        if entry.num_leases or entry.num_pins:
            entry.dropped = True
            self._dropped[entry.serial] = entry
        else:
            self._free_slot(entry)

    def _free_slot(self, entry: IndexEntry) -> None:
        self._free.append(entry.slot)
        self._tenants.remove(entry.tenant)
        if self._watcher is not None:
            self._watcher.became_free(entry)

    def _offer(self, entry: IndexEntry) -> None:
        if self._chains.is_evictable(entry):
            self._queue.offer(entry)
            self._tenants.offer(entry)

    def _unlink(self, parent: bytes | None) -> None:
        childless = self._chains.unlink(parent)
        if childless is not None:
            self._offer(childless)
