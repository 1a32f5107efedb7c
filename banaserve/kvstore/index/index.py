"""Block index of the store: slots, readers' leases, writers' reservations, promotions. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from banaserve.base.config.serve_config import KEPT_QUOTA
from banaserve.kvstore.index.eviction import EvictionQueue, Parents, Tenants
from banaserve.kvstore.index.kept import KeptBlocks
from banaserve.kvstore.index.records import (
    Grant,
    Hold,
    IndexEntry,
    SlotWatcher,
)
from banaserve.kvstore.index.seen_keys import SeenKeys
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.stats import IndexCounters, IndexStats

_NO_WATCHER = SlotWatcher()


class BlockIndex:
    """Keys, the slots that hold their blocks, and the owners that read or write the slots.

    Every slot is free, or holds one entry that is in the index or was dropped from it. Owners hold
    leases for reading and reservations for writing. Blocks form chains: a block may be evicted only
    when it is READY, no lease or copy uses it and no block in the index names it as its parent.
    Among evictable blocks the one that was acquired or committed longest ago is evicted first;
    blocks that requests asked to keep are evicted only if there is no other.
    Every operation costs O(log n) for each key; the end of an owner, O(n).

    Args:
        num_slots: Number of slots in the pool.
        watcher: Watcher that is notified of every change of a slot's state.
        counters: Counters to continue; new ones by default.
        tenant_quota: Largest share of the slots that one tenant may use; 1 sets no limit.
        is_intact: Check of a READY block before it is leased or copied; the block is dropped if
            the check returns False. None checks nothing.
        kept_quota: Largest share of the slots that ``keep`` may keep, and of a tenant's share
            of the slots that it may keep for the tenant.

    Attributes:
        num_leased: Number of slots that at least one lease or hold covers.
        num_held: Number of slots that at least one hold covers.
    """

    def __init__(
        self,
        num_slots: int,
        watcher: SlotWatcher = _NO_WATCHER,
        counters: IndexCounters | None = None,
        tenant_quota: float = 1.0,
        is_intact: Callable[[IndexEntry], bool] | None = None,
        kept_quota: float = KEPT_QUOTA,
    ) -> None:
        self.num_slots = num_slots
        self.num_promoting = 0
        self.counters = counters or IndexCounters()
        self._watcher = watcher
        self._is_intact = is_intact
        self._free = list(range(num_slots - 1, -1, -1))
        self._entries: dict[bytes, IndexEntry] = {}
        # Entries removed from ``_entries`` whose slot a lease or a copy still uses, by serial.
        self._dropped: dict[int, IndexEntry] = {}
        self._chains = Parents(self._entries)
        self._queue = EvictionQueue(self._is_evictable)
        self._tenants = Tenants(self._is_evictable, num_slots, tenant_quota)
        most, most_each = (int(kept_quota * n) for n in (num_slots, self._tenants.quota_slots))
        self._kept = KeptBlocks(most, most_each, self._offer)
        self._seen = SeenKeys()
        self._tick = 0
        self._last_serial = 0
        self.num_leased = 0
        self.num_held = 0
        self._writing: dict[int, IndexEntry] = {}
        self._leases: dict[int, Grant] = {}
        self._holds: dict[int, Hold] = {}
        self._last_lease_id = 0

    @property
    def has_owners(self) -> bool:
        """Return whether any owner holds a lease or a reservation."""
        return bool(self._leases or self._writing)

    def stats(self) -> IndexStats:
        """Return the current counters and gauges."""
        return IndexStats(
            num_slots=self.num_slots,
            used_slots=len(self._entries) + len(self._dropped),
            writing_slots=len(self._writing),
            promoting_slots=self.num_promoting,
            leased_slots=self.num_leased,
            num_leases=len(self._leases),
            num_holds=len(self._holds),
            held_slots=self.num_held,
            num_tenants=len(self._tenants),
            kept_slots=len(self._kept),
            **msgspec.structs.asdict(self.counters),
        )

    def is_at_quota(self, tenant: bytes) -> bool:
        """Return whether ``tenant`` has reached its quota, even if slots are free."""
        return self._tenants.is_full(tenant)

    def num_writing_of(self, owner: int) -> int:
        """Return the number of slots that ``owner`` has reserved and is still writing."""
        return sum(entry.owner == owner for entry in self._writing.values())

    def owns_any(self, owner: int) -> bool:
        """Return whether ``owner`` holds a lease or a reservation."""
        return self.num_writing_of(owner) > 0 or bool(self._leases_of(owner))

    def get(self, key: bytes) -> IndexEntry | None:
        """Return the entry of ``key`` in any state; None if there is none."""
        return self._entries.get(key)

    def lookup(self, keys: Iterable[bytes]) -> list[Lookup]:
        """Return the state of each key. Changes nothing, not even the order of eviction."""
        miss, hit, pending = Lookup.MISS, Lookup.HIT, Lookup.PENDING
        entries = map(self._entries.get, keys)
        return [miss if entry is None else hit if entry.ready else pending for entry in entries]

    def find(self, keys: Sequence[bytes]) -> list[IndexEntry]:
        """Return the longest prefix of ``keys`` whose blocks are READY and intact, or promoting."""
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
        """Return whether the bytes of ``entry`` are unchanged; drop the entry if they are not."""
        if self._is_intact is None or not entry.ready or self._is_intact(entry):
            return True
        self.drop(entry)
        return False

    # ---- leases

    def acquire(self, keys: Sequence[bytes], owner: int) -> Grant | None:
        """Lease the entries that ``find`` returns for ``keys``; None if it finds none."""
        entries = self.find(keys)
        self.counters.misses += len(keys)
        return self.lease(entries, owner) if entries else None

    def count_asked(self, keys: Sequence[bytes], num_found: int) -> None:
        """Count the blocks that a request asked for, of which it found the first ``num_found``.

        Blocks that another request is writing, or that are on their way, are not counted.
        """
        missing = [key for key in keys[num_found:] if key not in self._entries]
        self.counters.asked_blocks += num_found + len(missing)
        self.counters.found_blocks += num_found
        self.counters.new_blocks += sum(map(self._seen.add, missing))

    def lease(self, entries: Sequence[IndexEntry], owner: int) -> Grant:
        """Lease ``entries``, which belong to this index, to ``owner``."""
        self._last_lease_id += 1
        grant = Grant(self._last_lease_id, owner, [])
        self._leases[grant.lease_id] = grant
        self._tick += 1
        self.extend(grant, entries)
        return grant

    def extend(self, grant: Grant, entries: Sequence[IndexEntry]) -> None:
        """Let a lease cover further ``entries``."""
        num_ready = 0
        for entry in entries:
            self._cover(entry)
            entry.last_used = self._tick
            num_ready += entry.ready
        grant.entries.extend(entries)
        # A block that is being promoted was not readable when it was requested: a miss.
        self.counters.hits += num_ready
        self.counters.misses -= num_ready

    def release(self, lease_id: int) -> bool:
        """End a lease; return False if there is no such lease (any more)."""
        grant = self._leases.pop(lease_id, None)
        if grant is None:
            return False
        for entry in grant.entries:
            self._uncover(entry)
        return True

    # ---- holds

    def hold(
        self, hold_id: int, keys: Iterable[bytes], until_s: float, num_readers: int = 1
    ) -> None:
        """Keep the blocks of ``keys`` that are in the index, in any state, until ``end_hold``.

        A hold of the same number is extended. ``expire`` ends it at ``until_s``;
        ``num_readers`` decode legs are to read the blocks.
        """
        hold = self._holds.setdefault(hold_id, Hold({}, until_s, num_readers))
        hold.until_s = until_s
        for entry in filter(None, map(self._entries.get, keys)):
            if entry.serial not in hold.entries:
                hold.entries[entry.serial] = entry
                self.num_held += entry.num_holds == 0
                entry.num_holds += 1
                self._cover(entry)

    def end_hold(self, hold_id: int, reader: int | None = None) -> bool:
        """End a hold once all of its readers have ended it; return False if there is no such hold.

        ``reader`` is the number of the decode leg that no longer needs the blocks, from 0 on; None
        ends the hold for all legs.
        """
        hold = self._holds.get(hold_id)
        if hold is None:
            return False
        if reader is not None:
            hold.have_read.add(reader)
            if len(hold.have_read) < hold.num_readers:
                return True
        del self._holds[hold_id]
        for entry in hold.entries.values():
            self._end_hold_of(entry)
            self._uncover(entry)
        return True

    def expire(self, now_s: float) -> None:
        """End the holds, and the keeping of blocks, whose time is up."""
        for hold_id in [name for name, hold in self._holds.items() if hold.until_s <= now_s]:
            self.end_hold(hold_id)
        self._kept.expire(now_s)

    # ---- blocks to keep

    def keep(self, keys: Iterable[bytes], until_s: float) -> None:
        """Keep the blocks of ``keys`` that are in the index, in any state, until ``until_s``.

        They give way earlier if later calls exceed ``kept_quota``, or if a slot is needed and no
        other block can be evicted.

        Args:
            keys: Keys of a chain from its first block on.
        """
        entries = [entry for entry in map(self._entries.get, keys) if entry is not None]
        self.counters.kept_given_way += self._kept.keep(entries, until_s)

    # ---- writing

    def reserve(
        self,
        key: bytes,
        parent: bytes | None,
        owner: int,
        num_parts: int = 1,
        tenant: bytes = b"",
    ) -> tuple[int, int] | None:
        """Make ``key`` WRITING for ``owner``, evicting a block if no slot is available otherwise.

        Returns:
            The slot as (index, serial); None if the key is in the index already, every slot is in
            use, or the tenant is at its quota and has nothing to evict.
        """
        entry = self._add(key, parent, tenant)
        if entry is None:
            return None
        entry.owner, entry.num_parts = owner, num_parts
        self._writing[entry.serial] = entry
        return entry.slot, entry.serial

    def commit(self, serial: int, part: int) -> bool:
        """Note that ``part`` of a reservation is written; the block is READY after the last part.

        Returns:
            False if the reservation is gone, or this part has ended before.
        """
        return self._end_part(serial, part, failed=False)

    def abandon(self, serial: int, part: int | None = None) -> bool:
        """Give a reservation back, for all parts at once if ``part`` is None.

        With a part the slot is freed only after every part has ended: until then other parts may
        still be written.

        Returns:
            False if the reservation is gone, or this part has ended before.
        """
        if part is not None:
            return self._end_part(serial, part, failed=True)
        entry = self._writing.get(serial)
        if entry is None:
            return False
        del self._writing[serial]
        self._remove_unwritten(entry)
        return True

    def drop_owner(self, owner: int) -> None:
        """Release all leases and free all reservations of ``owner``."""
        for lease_id in self._leases_of(owner):
            self.release(lease_id)
        for entry in [one for one in self._writing.values() if one.owner == owner]:
            self.abandon(entry.serial)

    # ---- copies between slots and tiers

    def promote(self, key: bytes, parent: bytes | None, tenant: bytes = b"") -> IndexEntry | None:
        """Give ``key`` a slot that a tier or a push fills; pinned until ``end_promotion``.

        Returns:
            The entry; None in the cases of ``reserve``.
        """
        entry = self._add(key, parent, tenant)
        if entry is None:
            return None
        entry.promoting = True
        entry.num_pins = 1
        entry.last_used = self._tick
        self.num_promoting += 1
        self._watcher.became_pending(entry)
        return entry

    def end_promotion(self, entry: IndexEntry, *, filled: bool) -> None:
        """End the writing to the slot: the block is READY if ``filled``, else it is dropped."""
        if entry.promoting:
            if filled:
                self._stop_promoting(entry)
                self._publish(entry)
            else:
                self.drop(entry)
        self.unpin(entry)

    def pin(self, entry: IndexEntry) -> None:
        """Keep the slot's bytes in place until ``unpin``."""
        entry.num_pins += 1

    def unpin(self, entry: IndexEntry) -> None:
        """End one ``pin``; the slot may be evicted or freed after the last."""
        entry.num_pins -= 1
        self._settle(entry)

    # ---- dropping

    def drop(self, entry: IndexEntry) -> None:
        """Forget a block that is READY or promoting: its bytes are wrong or will not arrive.

        The slot is freed once the last lease and the last copy have ended.
        """
        self._watcher.failed(entry)
        if entry.promoting:
            self._stop_promoting(entry)
        entry.ready = False
        self._forget_holds(entry)
        self._remove(entry)

    def clear(self) -> int:
        """Drop all blocks not in use and without descendants in use; return their number."""
        self._kept.clear()
        num_dropped = 0
        while (entry := self._queue.pop()) is not None:
            self._remove(entry)
            num_dropped += 1
        return num_dropped

    # ---- single steps

    def _leases_of(self, owner: int) -> list[int]:
        return [lease_id for lease_id, grant in self._leases.items() if grant.owner == owner]

    def _add(self, key: bytes, parent: bytes | None, tenant: bytes) -> IndexEntry | None:
        if key in self._entries:
            return None
        if parent is not None and self._chains.closes_a_cycle(key, parent):
            parent = None
        # The link comes first: it keeps the parent from being evicted to make room.
        self._chains.link(parent)
        if not self._make_room(tenant):
            self._unlink(parent)
            return None
        self._last_serial += 1
        entry = IndexEntry(key, parent, self._free.pop(), self._last_serial, tenant)
        self._entries[key] = entry
        self._seen.add(key)
        self._tenants.add(tenant)
        return entry

    def _make_room(self, tenant: bytes) -> bool:
        counters = self.counters
        if self._tenants.is_full(tenant):
            entry = self._tenants.pop(tenant) or self._pop_kept(tenant)
            counters.quota_refusals += entry is None
            counters.quota_evictions += entry is not None
        elif self._free:
            return True
        else:
            entry = self._queue.pop() or self._pop_kept(None)
        if entry is None:
            return False
        counters.evictions += 1
        self._remove(entry)
        return True

    def _pop_kept(self, tenant: bytes | None) -> IndexEntry | None:
        """Let kept blocks, of ``tenant`` if given, give way until one can be evicted; return it."""
        entry = None
        while entry is None and self._kept.give_way(tenant):
            self.counters.kept_given_way += 1
            entry = self._queue.pop() if tenant is None else self._tenants.pop(tenant)
        return entry

    def _cover(self, entry: IndexEntry) -> None:
        self.num_leased += entry.num_leases == 0
        entry.num_leases += 1

    def _uncover(self, entry: IndexEntry) -> None:
        entry.num_leases -= 1
        if entry.num_leases == 0:
            self.num_leased -= 1
            self._settle(entry)

    def _end_hold_of(self, entry: IndexEntry) -> None:
        entry.num_holds -= 1
        self.num_held -= entry.num_holds == 0

    def _stop_promoting(self, entry: IndexEntry) -> None:
        entry.promoting = False
        self.num_promoting -= 1

    def _publish(self, entry: IndexEntry) -> None:
        self._tick += 1
        entry.ready = True
        entry.last_used = self._tick
        self._watcher.became_ready(entry)

    def _settle(self, entry: IndexEntry) -> None:
        """Free or offer ``entry`` for eviction if its last use has ended."""
        if not entry.dropped:
            self._offer(entry)
        elif not entry.num_leases and not entry.num_pins:
            del self._dropped[entry.serial]
            self._free_slot(entry)

    def _remove_unwritten(self, entry: IndexEntry) -> None:
        self._forget_holds(entry)
        self._remove(entry)

    def _forget_holds(self, entry: IndexEntry) -> None:
        """Remove an entry from all holds: its bytes are lost, or will not arrive."""
        for hold in self._holds.values():
            if hold.entries.pop(entry.serial, None) is not None:
                self._end_hold_of(entry)
                entry.num_leases -= 1
                self.num_leased -= entry.num_leases == 0

    def _remove(self, entry: IndexEntry) -> None:
        del self._entries[entry.key]
        self._queue.forget(entry)
        self._tenants.forget(entry)
        if entry.kept_until_s:
            self._kept.forget(entry)
        self._unlink(entry.parent)
        if entry.num_leases or entry.num_pins:
            entry.dropped = True
            self._dropped[entry.serial] = entry
        else:
            self._free_slot(entry)

    def _free_slot(self, entry: IndexEntry) -> None:
        self._free.append(entry.slot)
        self._tenants.remove(entry.tenant)
        self._watcher.became_free(entry)

    def _is_evictable(self, entry: IndexEntry) -> bool:
        if not entry.ready or entry.num_leases or entry.num_pins or entry.kept_until_s:
            return False
        return entry.key not in self._chains.num_children

    def _offer(self, entry: IndexEntry) -> None:
        if self._is_evictable(entry):
            self._queue.offer(entry)
            self._tenants.offer(entry)

    def _unlink(self, parent: bytes | None) -> None:
        childless = self._chains.unlink(parent)
        if childless is not None:
            self._offer(childless)

    def _end_part(self, serial: int, part: int, *, failed: bool) -> bool:
        entry = self._writing.get(serial)
        if entry is None or not 0 <= part < entry.num_parts or entry.ended_parts >> part & 1:
            return False
        entry.ended_parts |= 1 << part
        entry.failed |= failed
        if entry.ended_parts == (1 << entry.num_parts) - 1:
            del self._writing[serial]
            if entry.failed:
                self._remove_unwritten(entry)
            else:
                self.counters.commits += 1
                self._publish(entry)
                self._settle(entry)
        return True
