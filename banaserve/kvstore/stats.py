"""Numbers of the store, with the kind and the meaning of each, for operators and metrics."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_type_hints

import msgspec

PEERS = "peers"
"""Name of the tier of other machines' stores."""


class Measure(NamedTuple):
    """Annotation of a field that is exported as a metric of the field's name."""

    kind: Literal["counter", "gauge"]
    meaning: str


def counter(meaning: str) -> Measure:
    """Declare a number that only grows, from 0 at the start of the daemon."""
    return Measure("counter", meaning)


def gauge(meaning: str) -> Measure:
    """Declare a number as it is now."""
    return Measure("gauge", meaning)


def measures_of(kind: type) -> dict[str, Measure]:
    """Return the declared fields of a class by their names; other fields are left out."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: note
        for name, hint in hints.items()
        for note in getattr(hint, "__metadata__", ())
        if isinstance(note, Measure)
    }


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
    asked_blocks: Annotated[
        int, counter("Blocks that requests asked for, each request once, unless being written.")
    ] = 0
    found_blocks: Annotated[int, counter("Asked blocks that were found in memory or a tier.")] = 0
    new_blocks: Annotated[
        float,
        counter("Estimate of asked blocks never seen before: no store could have them."),
    ] = 0.0
    kept_given_way: Annotated[
        int, counter("Blocks no longer kept though their request had asked for a longer time.")
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
    kept_slots: Annotated[int, gauge("Slots with blocks that requests have asked to keep.")] = 0


class TierCounts(msgspec.Struct, kw_only=True):
    """Counters that every tier keeps."""

    stores: Annotated[int, counter("Blocks written.")] = 0
    stored_bytes: Annotated[int, counter("Total size of the blocks written.")] = 0
    loads: Annotated[int, counter("Blocks read.")] = 0
    loaded_bytes: Annotated[int, counter("Total size of the blocks read.")] = 0
    evictions: Annotated[int, counter("Blocks dropped to make room.")] = 0
    missing: Annotated[int, counter("Loads of blocks that were not in the tier (any more).")] = 0
    corrupt: Annotated[
        int, counter("Records that are unreadable or damaged: skipped, never served.")
    ] = 0
    failures: Annotated[int, counter("Loads and stores that failed otherwise.")] = 0


class TierStats(TierCounts, kw_only=True):
    """Counters and gauges of a tier.

    Attributes:
        problem: Reason in one line why the tier is out of service, stores nothing, or goes on
            without some of its peers.
        keeps: Description of blocks that ``clear`` leaves for later loads; empty for none.
    """

    name: str
    available: Annotated[bool, gauge("1 while the tier is in service.")] = True
    problem: str = ""
    capacity_bytes: Annotated[int, gauge("Budget of the tier; 0 if it has none of its own.")] = 0
    used_bytes: Annotated[int, gauge("Bytes used, including headers and dead records.")] = 0
    num_blocks: Annotated[int, gauge("Blocks that a load could return.")] = 0
    in_flight: Annotated[int, gauge("Loads and stores under way.")] = 0
    load_bytes_per_s: Annotated[float, gauge("Recent speed of loads; 0 until the first.")] = 0.0
    store_bytes_per_s: Annotated[float, gauge("Recent speed of stores; 0 until the first.")] = 0.0
    keeps: str = ""


class CopyCounters(msgspec.Struct, kw_only=True):
    """Counters of the copies between memory and one tier."""

    promoted: Annotated[int, counter("Blocks copied into memory.")] = 0
    promotion_failures: Annotated[int, counter("Copies into memory that failed here.")] = 0
    declined: Annotated[
        int, counter("Requested blocks not fetched because computing was predicted cheaper.")
    ] = 0
    predicted_fetch_s: Annotated[float, counter("Seconds predicted for promoted blocks.")] = 0.0
    measured_fetch_s: Annotated[float, counter("Seconds that the same blocks took.")] = 0.0
    demoted: Annotated[int, counter("Blocks written behind.")] = 0
    demotion_failures: Annotated[int, counter("Writes behind that failed.")] = 0
    dropped_before_demotion: Annotated[
        int, counter("Blocks that left memory, or the backlog, before they were written.")
    ] = 0


class TierReport(CopyCounters, kw_only=True):
    """Numbers of a tier, counted by the tier itself (``stats``) and by the store."""

    stats: TierStats
    promoting_slots: Annotated[int, gauge("Slots that it fills or is about to fill.")] = 0
    backlog_blocks: Annotated[int, gauge("Blocks waiting to be written to it.")] = 0


class StoreStats(IndexStats, kw_only=True):
    """Counters and gauges of the store.

    Attributes:
        generation: Generation of the current pool; 0 until the first client has set the slot size.
        slot_bytes: Size of a slot; 0 until the first client has set it.
        tiers: Reports of the tiers below memory, fastest first.
    """

    generation: int
    slot_bytes: int
    capacity_bytes: Annotated[int, gauge("Size of the pool.")]
    used_bytes: Annotated[int, gauge("Total size of the slots in use.")]
    quarantined_slots: Annotated[
        int, gauge("Slots being written whose connection is lost while its process lives.")
    ]
    clients: Annotated[int, gauge("Connections that share blocks.")]
    joined: Annotated[
        int, counter("Keys asked for by acquire that were already promoted for another client.")
    ]
    corrupt_blocks: Annotated[
        int, counter("Blocks in memory whose checksum was wrong when requested.")
    ]
    refused_clients: Annotated[int, counter("Connections refused because of their fingerprint.")]
    layout_mismatches: Annotated[
        int, counter("Connections of a model and salt in use whose layout keeps blocks apart.")
    ]
    protocol_errors: Annotated[int, counter("Connections closed because of an invalid message.")]
    lent_blocks: Annotated[int, counter("Blocks that stores of other machines have fetched.")]
    lent_bytes: Annotated[int, counter("Total size of these blocks.")]
    pushed_blocks: Annotated[
        int, counter("Blocks offered to those stores while being written, then committed.")
    ]
    pushed_by_layer_blocks: Annotated[
        int, counter("Pushed blocks of which some layers were reported before others were written.")
    ]
    received_blocks: Annotated[int, counter("Blocks that those stores have pushed here.")]
    tiers: tuple[TierReport, ...]


def still_held(stats: StoreStats) -> list[str]:
    """Return a line for each thing that a just cleared store still holds, without its peers."""
    lines = []
    if stats.used_slots:
        lines.append(f"{stats.used_slots} slots of memory are in use")
    for tier in (report.stats for report in stats.tiers if report.stats.name != PEERS):
        if not tier.available:
            lines.append(f"the {tier.name} tier is out of service: {tier.problem}")
        elif tier.num_blocks or tier.in_flight:
            lines.append(
                f"the {tier.name} tier has {tier.num_blocks} blocks, and {tier.in_flight} reads "
                "and writes are under way"
            )
        if tier.keeps:
            lines.append(f"the {tier.name} tier keeps {tier.keeps}")
    return lines
