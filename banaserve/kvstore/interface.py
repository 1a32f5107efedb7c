"""What the KV cache store says to its clients: values only, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec


class Lookup(IntEnum):
    """What the store knows of a key."""

    MISS = 0
    HIT = 1
    PENDING = 2


class Slot(msgspec.Struct, frozen=True, array_like=True):
    """One block's place in the pool, as one use of that place.

    ``serial`` tells apart the successive uses of one index, so that a late commit of an abandoned
    reservation cannot publish what somebody else is writing there now.

    Attributes:
        index: Which slot of the pool: its bytes begin at ``index * slot_bytes``.
        generation: The pool's generation; a slot of another generation means nothing.
        serial: Unique for each reservation within a generation.
    """

    index: int
    generation: int
    serial: int


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """The right to read a run of blocks: none of them is evicted before its release."""

    id: int
    generation: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The outcome of ``StoreClient.exchange``.

    Attributes:
        lease: Covers ``slots``; None when the first key asked for was not readable.
        slots: Where the longest readable prefix of the acquired keys lies, in their order.
        reserved: One entry for each reserved key; None where it is present already, is being
            written by another, or there is no room.
    """

    lease: Lease | None
    slots: Sequence[Slot]
    reserved: Sequence[Slot | None]


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store's counters (since the daemon started) and gauges (now).

    Attributes:
        generation: Of the present pool; 0 until the first client has set the slot size.
        capacity_bytes: Size of the pool.
        used_bytes: Slots in use times their size.
        slot_bytes: 0 until the first client has set it.
        num_slots: Slots in the pool.
        used_slots: Slots that hold a block or are being written.
        writing_slots: Slots that are being written.
        leased_slots: Slots that at least one lease covers.
        num_leases: Leases held.
        quarantined_slots: Slots being written whose client went away while its process lives.
        hits: Keys asked for by acquire that were readable.
        misses: Keys asked for by acquire that were not.
        evictions: Blocks dropped to make room.
        commits: Blocks that became readable.
        clients: Connections that share blocks.
        refused_clients: Connections refused because of their fingerprint.
        layout_mismatches: Connections whose model and salt match another's while the layout
            does not: they work, but neither sees the other's blocks.
        protocol_errors: Connections closed because of what they sent.
        tiers: Names of the tiers, fastest first.
    """

    generation: int
    capacity_bytes: int
    used_bytes: int
    slot_bytes: int
    num_slots: int
    used_slots: int
    writing_slots: int
    leased_slots: int
    num_leases: int
    quarantined_slots: int
    hits: int
    misses: int
    evictions: int
    commits: int
    clients: int
    refused_clients: int
    layout_mismatches: int
    protocol_errors: int
    tiers: tuple[str, ...]
