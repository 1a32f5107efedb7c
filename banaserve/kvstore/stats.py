"""Statistics of the store for clients, operators and metrics."""

from __future__ import annotations

import msgspec

from banaserve.kvstore.tiers.interface import TierStats


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """A tier's own numbers, and what the store does with it.

    Attributes:
        stats: As the tier counts.
        promoted: Blocks copied from it into memory.
        promotion_failures: Copies into memory that did not succeed here.
        declined: Blocks asked for that were left there because computing was predicted cheaper.
        promoting_slots: Slots that it fills or is about to fill.
        predicted_fetch_s: Sum over promoted blocks of the seconds predicted at the start.
        measured_fetch_s: Sum over the same blocks of the seconds that it took.
        demoted: Blocks written to it.
        demotion_failures: Writes that it did not carry out.
        dropped_before_demotion: Blocks that left memory, or had no place in the backlog, before
            they were written.
        backlog_blocks: Blocks waiting to be written to it.
    """

    stats: TierStats
    promoted: int = 0
    promotion_failures: int = 0
    declined: int = 0
    promoting_slots: int = 0
    predicted_fetch_s: float = 0.0
    measured_fetch_s: float = 0.0
    demoted: int = 0
    demotion_failures: int = 0
    dropped_before_demotion: int = 0
    backlog_blocks: int = 0


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """The store's counters (since the daemon started) and gauges (now).

    Attributes:
        generation: Of the present pool; 0 until the first client has set the slot size.
        capacity_bytes: Size of the pool.
        used_bytes: Slots in use times their size.
        slot_bytes: 0 until the first client has set it.
        num_slots: Slots in the pool.
        used_slots: Slots that hold a block, are being filled, or are still read after their block
            was dropped.
        writing_slots: Slots that clients are writing.
        promoting_slots: Slots that tiers fill or are about to fill.
        leased_slots: Slots that at least one lease or hold covers.
        num_leases: Leases held.
        num_holds: Prompts whose blocks are held until decode has read them.
        held_slots: Slots that hold blocks of these prompts.
        quarantined_slots: Slots being written whose client went away while its process lives.
        hits: Keys asked for by acquire that were readable in memory.
        misses: Keys asked for by acquire that were not.
        joined: Keys asked for by acquire that were on their way up for another client already.
        evictions: Blocks dropped from memory to make room.
        commits: Blocks that clients made readable.
        corrupt_blocks: Blocks in memory whose checksum was wrong when they were asked for.
        num_tenants: Tenants that use at least one slot.
        quota_evictions: Of ``evictions``, those that a tenant at its quota did to itself.
        quota_refusals: Slots refused because a tenant was at its quota with all of them in use.
        clients: Connections that share blocks.
        refused_clients: Connections refused because of their fingerprint.
        layout_mismatches: Connections whose model and salt match another's while the layout
            does not: they work, but neither sees the other's blocks.
        protocol_errors: Connections closed because of what they sent.
        lent_blocks: Blocks that stores of other machines have fetched.
        lent_bytes: Of them.
        pushed_blocks: Blocks that were offered to those stores while they were being written, and
            committed.
        pushed_by_layer_blocks: Of ``pushed_blocks``, those of which some layers were told to be
            there before the others were written.
        received_blocks: Blocks that those stores have sent so.
        tiers: Below memory, fastest first.
    """

    generation: int
    capacity_bytes: int
    used_bytes: int
    slot_bytes: int
    num_slots: int
    used_slots: int
    writing_slots: int
    promoting_slots: int
    leased_slots: int
    num_leases: int
    num_holds: int = 0
    held_slots: int = 0
    quarantined_slots: int
    hits: int
    misses: int
    joined: int
    evictions: int
    commits: int
    corrupt_blocks: int
    num_tenants: int
    quota_evictions: int
    quota_refusals: int
    clients: int
    refused_clients: int
    layout_mismatches: int
    protocol_errors: int
    lent_blocks: int
    lent_bytes: int
    pushed_blocks: int
    pushed_by_layer_blocks: int
    received_blocks: int
    tiers: tuple[TierReport, ...]
