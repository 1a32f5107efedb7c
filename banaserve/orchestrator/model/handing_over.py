"""Time that the KV of a prompt takes from the machine of one instance to that of another. Pure."""

from __future__ import annotations

from banaserve.types import Distance, InstanceView

UNMEASURED = Distance(round_trip_s=1e-3, bytes_per_s=125e6)
"""A way that nobody has measured, or that could not be, is taken for a slow one: 1 Gbit/s."""


def way_s(source: InstanceView, target: InstanceView, tokens: int) -> float:
    """Returns the seconds that the KV of ``tokens`` takes over the way between two instances.

    0 where both are on one machine. Where it is not known how much KV a token has, only a round
    trip is counted, and among the ways to several others the slower ones look alike.
    """
    if target.id not in source.far:
        return 0.0
    way = source.far[target.id] or UNMEASURED
    return way.round_trip_s + tokens * source.kv_token_bytes / way.bytes_per_s
