"""What must hold in the index between two operations."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from banaserve.kvstore.index import BlockIndex


def check_index(index: BlockIndex) -> None:
    """Raise AssertionError where ``index`` contradicts itself."""
    _check_entries(index)
    _check_leases(index)
    _check_owners(index)
    entries = index._entries
    index._queue.check(entries)
    index._tenants.check(entries, [*entries.values(), *index._dropped.values()])


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
        assert not writing or not entry.num_leases, "a lease on a block that is being written"
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
    for entry in leased:
        holder = index._dropped.get(entry.serial) if entry.dropped else index._entries[entry.key]
        assert holder is entry, "a leased block is gone"
    assert index.num_leased == len({entry.serial for entry in leased})
    in_use = [*index._entries.values(), *index._dropped.values()]
    assert len(leased) == sum(entry.num_leases for entry in in_use)


def _check_owners(index: BlockIndex) -> None:
    owned_by = index._owned
    assert all(owned.lease_ids or owned.serials for owned in owned_by.values())
    for owner, owned in owned_by.items():
        assert all(index._leases[lease_id].owner == owner for lease_id in owned.lease_ids)
        assert all(index._writing[serial].owner == owner for serial in owned.serials)
    assert len(index._leases) == sum(len(owned.lease_ids) for owned in owned_by.values())
    assert len(index._writing) == sum(len(owned.serials) for owned in owned_by.values())
