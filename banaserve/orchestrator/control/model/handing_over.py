"""Transfer time of a prompt's KV between the machines of two instances. Pure."""

from __future__ import annotations

from banaserve.base.types import Distance, InstanceView

UNMEASURED = Distance(round_trip_s=1e-3, bytes_per_s=125e6)
"""Assumed network path if none has been, or could be, measured: a slow one of 1 Gbit/s."""


def way_s(source: InstanceView, target: InstanceView, tokens: int) -> float:
    """Return the transfer time of the KV of ``tokens`` tokens between two instances, in seconds.

    The time is 0 if both are on one machine. If the KV size of a token is unknown, only a round
    trip counts, so that paths of different bandwidth look alike.
    """
    if target.id not in source.far:
        return 0.0
    way = source.far[target.id] or UNMEASURED
    return way.round_trip_s + tokens * source.kv_token_bytes / way.bytes_per_s
