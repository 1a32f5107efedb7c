"""Blocks that a store still holds after it was cleared."""

from __future__ import annotations

from banaserve.kvstore.peers.tier import NAME as PEERS
from banaserve.kvstore.stats import StoreStats


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
