"""Who looks after the replicas of a balancer that is dead."""

from __future__ import annotations

from collections.abc import Mapping


def heir(distances_ms: Mapping[str, float]) -> str:
    """Returns the region that is nearest to the dead one; the first by name among equals.

    Every living balancer asks this with the same distances and so comes to the same answer. Where
    they differ for a moment, two of them serve a replica, which loses and doubles nothing.

    Args:
        distances_ms: From each living region to the dead one, as each measured it; at least one.
    """
    return min(distances_ms, key=lambda region: (distances_ms[region], region))
