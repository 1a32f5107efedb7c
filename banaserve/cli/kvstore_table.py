"""The store's numbers as a table for people."""

from __future__ import annotations

from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.stats import StoreStats, TierReport

Row = tuple[str, str]


def store_rows(stats: StoreStats) -> list[Row]:
    """One row a fact: memory and tiers first."""
    num_asked = stats.hits + stats.misses
    slot_size = format_size(stats.slot_bytes)
    rows = [
        (
            "memory",
            f"{_of(stats.used_bytes, stats.capacity_bytes)}, {_rate(stats.hits, num_asked)}",
        ),
        ("slots", f"{stats.used_slots} of {stats.num_slots} used, {slot_size} each"),
    ]
    for tier in stats.tiers:
        rows += _tier_rows(tier, stats.misses)
    return [
        *rows,
        ("being written", f"{stats.writing_slots} ({stats.quarantined_slots} quarantined)"),
        ("coming up", f"{stats.promoting_slots} ({stats.joined} reads joined others)"),
        ("leases", f"{stats.num_leases} on {stats.leased_slots} slots"),
        ("evictions", str(stats.evictions)),
        (
            "tenants",
            f"{stats.num_tenants} ({stats.quota_evictions} evictions and "
            f"{stats.quota_refusals} refusals by quota)",
        ),
        ("corrupt in memory", str(stats.corrupt_blocks)),
        ("clients", f"{stats.clients} ({stats.refused_clients} refused)"),
        ("layout mismatches", str(stats.layout_mismatches)),
        ("protocol errors", str(stats.protocol_errors)),
    ]


def _tier_rows(tier: TierReport, num_misses: int) -> list[Row]:
    name, stats = tier.stats.name, tier.stats
    if not stats.available:
        return [(name, f"out of service: {stats.problem}")]
    state = f"; {stats.problem}" if stats.problem else ""
    return [
        (
            name,
            f"{_of(stats.used_bytes, stats.capacity_bytes)}, {stats.num_blocks} blocks, "
            f"{_rate(tier.promoted, num_misses)}{state}",
        ),
        (
            f"{name} up",
            f"{tier.promoted} promoted, {tier.promoting_slots} coming, {tier.declined} declined, "
            f"{tier.promotion_failures} failed, {_per_s(stats.load_bytes_per_s)}, "
            f"{tier.measured_fetch_s:.3g} s where {tier.predicted_fetch_s:.3g} s were predicted",
        ),
        (
            f"{name} down",
            f"{tier.demoted} written, {tier.backlog_blocks} waiting, "
            f"{tier.dropped_before_demotion} evicted before, {tier.demotion_failures} failed, "
            f"{_per_s(stats.store_bytes_per_s)}",
        ),
        (
            f"{name} faults",
            f"{stats.corrupt} corrupt, {stats.missing} missing, {stats.failures} failed, "
            f"{stats.evictions} evicted",
        ),
    ]


def _of(used_bytes: int, capacity_bytes: int) -> str:
    if not capacity_bytes:
        return f"{format_size(used_bytes)} used"
    return f"{format_size(used_bytes)} of {format_size(capacity_bytes)} used"


def _rate(num_hits: int, num_asked: int) -> str:
    return f"{num_hits / num_asked:.1%} of {num_asked} blocks hit" if num_asked else "none asked"


def _per_s(bytes_per_s: float) -> str:
    return f"{format_size(int(bytes_per_s))}/s" if bytes_per_s else "speed unknown"
