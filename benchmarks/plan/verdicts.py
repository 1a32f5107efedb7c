"""Truth of a case from measured means, and the advisor's verdict from simulated ones. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import exp, log
from typing import NamedTuple

from banaserve.base.statistics import Interval
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.gain import MOST_RATIO, WORTH, Answer, Gain, answer
from banaserve_bench.plan.trial import StepError, scenarios
from benchmarks.plan.runs import ServedRun

_NEAR = 2.0
"""Largest ratio of the numbers of clients of two runs between which there is no surprise."""


class Means(NamedTuple):
    """Mean TTFT and TPOT of a run, in seconds."""

    ttft_s: float
    tpot_s: float


class Point(NamedTuple):
    """Operating point: means, and output tokens per second and GPU."""

    ttft_s: float
    tpot_s: float
    rate: float

    def between(self, other: Point, share: float) -> Point:
        """Return the point at ``share`` of the way to ``other``, in logarithms."""
        return Point(
            *(exp(log(a) + share * (log(b) - log(a))) for a, b in zip(self, other, strict=True))
        )

    def is_within(self, limits: LatencyLimits) -> bool:
        """Return whether both means are within the limits."""
        return self.ttft_s <= limits.ttft_s and self.tpot_s <= limits.tpot_s


Curve = Sequence[tuple[ServedRun, Point]]


def curves(runs: Sequence[ServedRun], means: Mapping[str, Means]) -> list[Curve]:
    """Return the operating points of each engine arrangement, by ascending number of clients."""
    found: dict[tuple[object, ...], list[tuple[ServedRun, Point]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.clients):
        of = means[run.id]
        found[run.version, run.prefill, run.engines].append((run, Point(*of, run.rate(*of))))
    return list(found.values())


def best_rate(of: Sequence[Curve], limits: LatencyLimits) -> float:
    """Return the most output tokens per second and GPU within the limits; 0 if there are none.

    Between two runs of one arrangement with at most twice as many clients, means are taken to
    change evenly in logarithms: the number of clients is chosen by who runs it.
    """
    return max((point.rate for curve in of for point in _within(curve, limits)), default=0.0)


def _within(curve: Curve, limits: LatencyLimits) -> Iterator[Point]:
    for place, (run, point) in enumerate(curve):
        if not point.is_within(limits):
            continue
        yield point
        if place + 1 < len(curve) and curve[place + 1][0].clients <= _NEAR * run.clients:
            yield point.between(curve[place + 1][1], _share(point, curve[place + 1][1], limits))


def _share(point: Point, other: Point, limits: LatencyLimits) -> float:
    """Return the share of the way from a point within the limits at which one of them is met."""
    shares = [1.0]
    for limit, near, far in (
        (limits.ttft_s, point.ttft_s, other.ttft_s),
        (limits.tpot_s, point.tpot_s, other.tpot_s),
    ):
        if far > limit:
            shares.append(log(limit / near) / log(far / near))
    return min(shares)
