"""Statistics of the store for clients, operators and metrics."""

from __future__ import annotations

import msgspec

from banaserve.kvstore.tiers.interface import TierStats


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a tier, counted by the tier itself and by the store.

    Attributes:
        stats: Numbers that the tier counts.
        promoted: Number of blocks copied from the tier into memory.
        promotion_failures: Number of copies into memory that failed in this tier.
        declined: Number of requested blocks that were left in the tier because computing them was
            predicted to be cheaper.
        promoting_slots: Number of slots that the tier fills or is about to fill.
        predicted_fetch_s: Sum over promoted blocks of the seconds predicted at the start.
        measured_fetch_s: Sum over the same blocks of the measured seconds.
        demoted: Number of blocks written to the tier.
        demotion_failures: Number of writes to the tier that failed.
        dropped_before_demotion: Number of blocks that left memory, or had no place in the backlog,
            before they were written.
        backlog_blocks: Number of blocks waiting to be written to the tier.
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
    """Counters (since the daemon started) and gauges (now) of the store.

    Attributes:
        generation: Generation of the current pool; 0 until the first client has set the slot size.
        capacity_bytes: Size of the pool.
        used_bytes: Total size of the slots in use.
        slot_bytes: Size of a slot; 0 until the first client has set it.
        num_slots: Number of slots in the pool.
        used_slots: Number of slots that hold a block, are being filled, or are still read after
            their block was dropped.
        writing_slots: Number of slots that clients are writing.
        promoting_slots: Number of slots that tiers or peers fill or are about to fill.
        leased_slots: Number of slots that at least one lease or hold covers.
        num_leases: Number of leases.
        num_holds: Number of prompts whose blocks are held until decode has read them.
        held_slots: Number of slots with blocks of these prompts.
        quarantined_slots: Number of slots being written whose connection is lost while its process
            lives.
        hits: Number of keys in acquire that were readable in memory.
        misses: Number of keys in acquire that were not readable in memory.
        joined: Number of keys in acquire that were already being promoted for another client.
        evictions: Number of blocks dropped from memory to make room.
        commits: Number of blocks that clients made readable.
        corrupt_blocks: Number of blocks in memory whose checksum was wrong when requested.
        num_tenants: Number of tenants that use at least one slot.
        quota_evictions: Number of ``evictions`` of a tenant's own blocks because the tenant was at
            its quota.
        quota_refusals: Number of slots refused because a tenant was at its quota with all its slots
            in use.
        clients: Number of connections that share blocks.
        refused_clients: Number of connections refused because of their fingerprint.
        layout_mismatches: Number of connections with the same model and salt as another one but
            another layout: they work, but neither sees the other's blocks.
        protocol_errors: Number of connections closed because of an invalid message.
        lent_blocks: Number of blocks that stores of other machines have fetched.
        lent_bytes: Total size of these blocks.
        pushed_blocks: Number of blocks that were offered to those stores while they were being
            written, and then committed.
        pushed_by_layer_blocks: Number of ``pushed_blocks`` of which some layers were reported
            before the others were written.
        received_blocks: Number of blocks that those stores have pushed here.
        tiers: Reports of the tiers below memory, fastest first.
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
