"""Outliers among replicas: those that fail much more often than the others, or are much slower.

As in Envoy's outlier detection, replicas are compared over their recent requests, never by few of
them, only a share of them may be ejected at once, and ejections grow. Envoy compares with mean and
standard deviation, which show nothing among fewer than five; here the median of the replicas is the
measure, the lower one of two. Envoy's consecutive failures are counted by ``target.py:Breaker``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from statistics import median, median_low
from typing import NamedTuple

from banaserve_route.balancer.config import HealthSettings
from banaserve_route.policies.interface import ReplicaId


class OutlierReason(StrEnum):
    """Reason of an ejection, for the log and as a metric's label."""

    FAILURES = "failures"
    LATENCY = "latency"


class ReplicaRecord(NamedTuple):
    """Recent requests of a replica.

    Attributes:
        num_answers: Number of requests that the replica has answered or has failed.
        num_failures: Number of those that it has failed: broken off, or a status of 500 or more.
        paces: Times to first token over the usual ones.
        waits: Minimum paces of requests without a first token: under way, or cancelled.
    """

    num_answers: int
    num_failures: int
    paces: Sequence[float]
    waits: Sequence[float]


class Outlier(NamedTuple):
    """Replica that does much worse than the others.

    Attributes:
        why: Explanation for the log.
    """

    replica: ReplicaId
    reason: OutlierReason
    why: str


def find_outliers(
    records: Mapping[ReplicaId, ReplicaRecord], health: HealthSettings
) -> dict[ReplicaId, Outlier]:
    """Return the outliers among comparable replicas: failing ones first, then the slowest ones."""
    found = _slow(records, health)
    failing = _failing(records, health)
    return failing | {name: one for name, one in found.items() if name not in failing}


def choose_ejections(
    outliers: Sequence[Outlier],
    num_replicas: int,
    num_ejected: int,
    num_up: int,
    health: HealthSettings,
) -> Sequence[Outlier]:
    """Return the outliers to eject: the first ones, within the allowed share, never the last one.

    Args:
        num_replicas: Number of comparable replicas.
        num_ejected: Number of them that are ejected already.
        num_up: Number of them that may get requests now.
    """
    room = int(health.outlier_max_ejection_fraction * num_replicas) - num_ejected
    return outliers[: max(0, min(room, num_up - 1))]


def _failing(
    records: Mapping[ReplicaId, ReplicaRecord], health: HealthSettings
) -> dict[ReplicaId, Outlier]:
    least = health.outlier_failure_fraction
    shares = {
        name: one.num_failures / one.num_answers
        for name, one in records.items()
        if one.num_answers >= health.outlier_request_volume
    }
    if not least or len(shares) < 2:
        return {}
    usual = median_low(shares.values())
    return {
        name: Outlier(
            name,
            OutlierReason.FAILURES,
            f"{shares[name]:.0%} of its requests failed, {usual:.0%} at the others",
        )
        for name in sorted(shares, key=shares.__getitem__, reverse=True)
        if shares[name] - usual >= least
    }


def _slow(
    records: Mapping[ReplicaId, ReplicaRecord], health: HealthSettings
) -> dict[ReplicaId, Outlier]:
    factor, volume = health.outlier_latency_factor, health.outlier_request_volume
    known = {name: median(one.paces) for name, one in records.items() if len(one.paces) >= volume}
    if not factor or not known:
        return {}
    usual = median_low(known.values())
    paces = {}
    for name, one in records.items():
        # A first token that has not come says something only if it is late already.
        late = [wait for wait in one.waits if wait >= factor * usual]
        has_peers = bool(known.keys() - {name})
        if has_peers and len(one.paces) + len(late) >= volume:
            paces[name] = median([*one.paces, *late])
    return {
        name: Outlier(
            name,
            OutlierReason.LATENCY,
            f"its first tokens take {paces[name] / usual:.1f} times as long as the others'",
        )
        for name in sorted(paces, key=paces.__getitem__, reverse=True)
        if paces[name] >= factor * usual
    }
