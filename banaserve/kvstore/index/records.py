"""Records of the index: the block of a key, a lease, a hold, and the possessions of an owner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Protocol

import msgspec

from banaserve.kvstore.measure import counter, gauge

MAX_SERIAL = 2**60
HOLD_S = 300.0
"""Time in seconds after which a hold ends by itself: the front door that would end it has died."""


class IndexCounters(msgspec.Struct, kw_only=True):
    """Counters of events, which outlive the index of one way to cut the pool."""

    hits: Annotated[int, counter("Keys asked for by acquire that were readable in memory.")] = 0
    misses: Annotated[
        int, counter("Keys asked for by acquire that were not readable in memory.")
    ] = 0
    evictions: Annotated[int, counter("Blocks dropped from memory to make room.")] = 0
    commits: Annotated[int, counter("Blocks that clients made readable.")] = 0
    quota_evictions: Annotated[
        int, counter("Evictions of a tenant's own blocks because it was at its quota.")
    ] = 0
    quota_refusals: Annotated[
        int, counter("Slots refused to a tenant at its quota with all its slots in use.")
    ] = 0


class IndexStats(IndexCounters, kw_only=True):
    """Counters and gauges of the index."""

    num_slots: Annotated[int, gauge("Slots in the pool.")]
    used_slots: Annotated[
        int, gauge("Slots that hold a block, are being filled, or are still read after a drop.")
    ]
    writing_slots: Annotated[int, gauge("Slots that clients are writing.")]
    promoting_slots: Annotated[int, gauge("Slots that tiers or peers fill or are about to fill.")]
    leased_slots: Annotated[int, gauge("Slots that at least one lease or hold covers.")]
    num_leases: Annotated[int, gauge("Leases held.")]
    num_holds: Annotated[int, gauge("Prompts held until decode has read their blocks.")] = 0
    held_slots: Annotated[int, gauge("Slots with blocks of these prompts.")] = 0
    num_tenants: Annotated[int, gauge("Tenants that use at least one slot.")]


@dataclass(eq=False, slots=True)
class IndexEntry:
    """Block of a key.

    It is WRITING until every part is committed, or ``promoting`` until a tier or a push has filled
    it, and READY after that. It is ``dropped`` if its key was removed from the index while its slot
    is still in use.

    Attributes:
        num_leases: Number of leases and holds that cover the block.
        num_holds: Number of holds among these.
        num_pins: Number of copies to or from the slot, by tiers or peers, under way or about to
            begin.
        last_used: Tick of the last acquire or commit.
        checksum: Checksum of the slot's bytes when it became READY, if the store keeps checksums.
    """

    key: bytes
    parent: bytes | None
    slot: int
    serial: int
    tenant: bytes
    owner: int = 0
    num_parts: int = 0
    ended_parts: int = 0
    failed: bool = False
    ready: bool = False
    promoting: bool = False
    dropped: bool = False
    checksum: int = 0
    num_leases: int = 0
    num_holds: int = 0
    num_pins: int = 0
    last_used: int = 0


class SlotWatcher(Protocol):
    """Observer of slot changes, called within an operation; it must not call the index."""

    def became_pending(self, entry: IndexEntry) -> None:
        """Note that a tier or a push is about to fill the slot."""
        ...

    def became_ready(self, entry: IndexEntry) -> None:
        """Note that the slot may be leased."""
        ...

    def failed(self, entry: IndexEntry) -> None:
        """Note that the block in the slot is lost to its leases."""
        ...

    def became_free(self, entry: IndexEntry) -> None:
        """Note that the slot is no longer in use."""
        ...


@dataclass(slots=True)
class Grant:
    """Lease by which ``owner`` may read the slots of ``entries``."""

    lease_id: int
    owner: int
    entries: list[IndexEntry]

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Slots of the blocks, each as (index, serial)."""
        return [(entry.slot, entry.serial) for entry in self.entries]

    @property
    def num_ready(self) -> int:
        """Number of entries at the front that are readable."""
        for number, entry in enumerate(self.entries):
            if not entry.ready:
                return number
        return len(self.entries)


@dataclass(slots=True)
class Hold:
    """Hold of a prompt that is handed over: none of its blocks is evicted before the hold ends.

    Attributes:
        entries: Blocks by serial; some may be being written.
        until_s: Time at which the hold ends by itself.
        num_readers: Number of decode legs that are to read the blocks.
        have_read: Numbers of the legs, from 0 on, that no longer need the hold.
    """

    entries: dict[int, IndexEntry]
    until_s: float
    num_readers: int = 1
    have_read: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Owned:
    """Leases and reservations of one owner, which end with that owner."""

    lease_ids: set[int] = field(default_factory=set)
    serials: set[int] = field(default_factory=set)
