"""What must hold in a store's index between two operations."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from banaserve.kvstore.index.index import BlockIndex


def check_index(index: BlockIndex) -> None:
    """Assert that all tables of the index agree."""
    _check_entries(index)
    _check_leases(index)
    index._queue.check(index._entries, index._entries.values())
    _check_tenants(index)
    _check_kept(index)


def _check_entries(index: BlockIndex) -> None:
    entries = index._entries
    in_use = [*entries.values(), *index._dropped.values()]
    slots = sorted(index._free + [entry.slot for entry in in_use])
    assert slots == list(range(index.num_slots)), "a slot is lost or used twice"
    parents = [entry.parent for entry in entries.values() if entry.parent is not None]
    assert Counter(parents) == index._chains.num_children
    for key, entry in entries.items():
        assert entry.key == key
        assert not entry.dropped
        writing = entry.serial in index._writing
        assert writing + entry.ready + entry.promoting == 1, "an entry in two states or none"
        assert not entry.promoting or entry.num_pins, "a promotion that nobody carries out"
    for serial, entry in index._dropped.items():
        assert entry.serial == serial
        assert entry.dropped
        assert entry.num_leases or entry.num_pins, "a dropped block keeps its slot for nobody"
        assert not entry.ready
        assert not entry.promoting
    assert index.num_promoting == sum(entry.promoting for entry in entries.values())


def _check_leases(index: BlockIndex) -> None:
    leased = [entry for grant in index._leases.values() for entry in grant.entries]
    assert not any(entry.serial in index._writing for entry in leased), "a lease on a write"
    held = [entry for hold in index._holds.values() for entry in hold.entries.values()]
    assert index.num_held == len({entry.serial for entry in held})
    leased += held
    for entry in leased:
        holder = index._dropped.get(entry.serial) if entry.dropped else index._entries[entry.key]
        assert holder is entry, "a leased block is gone"
    assert index.num_leased == len({entry.serial for entry in leased})
    in_use = [*index._entries.values(), *index._dropped.values()]
    assert len(leased) == sum(entry.num_leases for entry in in_use)


def _check_tenants(index: BlockIndex) -> None:
    """Assert that the counts are right and that no tenant is over its quota."""
    tenants, entries = index._tenants, index._entries
    in_use = [*entries.values(), *index._dropped.values()]
    assert tenants._num_slots == Counter(entry.tenant for entry in in_use)
    assert all(number <= tenants.quota_slots for number in tenants._num_slots.values())
    assert set(tenants._queues) == (set(tenants._num_slots) if tenants.has_quota else set())
    for tenant, queue in tenants._queues.items():
        queue.check(entries, (one for one in entries.values() if one.tenant == tenant))


def _check_kept(index: BlockIndex) -> None:
    """Assert that no more blocks are kept than allowed, and all of them are in the index."""
    kept = index._kept
    assert set(kept._all) == {entry for entry in index._entries.values() if entry.kept_until_s}
    assert len(kept) <= kept._most
    numbers = {tenant: len(its) for tenant, its in kept._of_tenant.items()}
    assert numbers == Counter(entry.tenant for entry in kept._all)
    assert all(number <= kept._most_each for number in numbers.values())
    groups = kept._of_tenant.values(), kept._until.values()
    assert all({*chain.from_iterable(group)} == {*kept._all} for group in groups)
    assert all(one.kept_until_s == until_s for until_s, its in kept._until.items() for one in its)
