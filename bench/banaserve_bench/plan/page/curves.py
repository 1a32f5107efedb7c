"""Figures behind a plan's pictures: Pareto front, latency over rate, parts of a request's time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from banaserve_bench.plan.search.advisor import CounterOffer, Result, Screening, Tried
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.plan.search.loads import Rows, faster, rate_per_s
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.time_parts import TimeParts

RATES = (0.5, 0.71, 1.0, 1.41, 2.0)
"""Factors of the load's rate for which latencies are drawn."""
_REQUESTS = 600
_MOST_CURVES = 6


class Placed(NamedTuple):
    """Candidate by what it gives and what it takes.

    Attributes:
        latency_s: 99th percentile of a request's whole time.
        per_gpu: Requests in time, per second and GPU, or per instance where GPUs are unknown.
    """

    name: str
    latency_s: float
    per_gpu: float


class RatePoint(NamedTuple):
    """Latencies of a candidate at one rate, as 99th percentiles in seconds."""

    rate_per_s: float
    ttft_s: float
    tpot_s: float
    goodput_fraction: float


class PlanCurves(NamedTuple):
    """Everything that a plan's pictures show.

    Attributes:
        placed: Candidates of the first load, the best first.
        over_rate: Latencies by candidate, for the best of each arrangement.
        parts: Mean parts of a request's time, for the best colocated candidate and the best other.
    """

    placed: Sequence[Placed]
    over_rate: Mapping[str, Sequence[RatePoint]]
    parts: Mapping[str, TimeParts]


def find_curves(
    asked: PlanQuestion,
    found: Screening,
    offers: Sequence[CounterOffer],
    tell: Callable[[str], None],
) -> PlanCurves:
    """Simulate what the pictures of a plan need beside its screening."""
    rows = asked.loads.first[:_REQUESTS]
    over_rate = {}
    for one in _best_of_each(found):
        tell(f"latency over rate: {one.name}")
        over_rate[one.name] = [_at_rate(asked, one, faster(rows, scale)) for scale in RATES]
    best = [group[0].candidate for group in (found.colocated, found.others) if group]
    tell("where time goes")
    parts = {one.name: asked.device_of(one).time_parts(one, rows) for one in best}
    more = [one.offered for one in offers if one.kind == "instances"]
    tried = (*found.colocated, *found.others, *more)
    return PlanCurves([_placed(asked, one) for one in tried], over_rate, parts)


def front(placed: Sequence[Placed]) -> list[Placed]:
    """Return those that no other one beats in both, in the order of their latency."""
    found: list[Placed] = []
    for one in sorted(placed, key=lambda one: (one.latency_s, -one.per_gpu)):
        if not found or one.per_gpu > found[-1].per_gpu:
            found.append(one)
    return found


def _best_of_each(found: Screening) -> list[Candidate]:
    """Return the best candidate of each arrangement: as many colocated ones as others, at most."""
    best: list[Candidate] = []
    for group in (found.colocated, found.others):
        by_arrangement = {one.candidate.arrangement: one.candidate for one in reversed(group)}
        best += list(reversed(by_arrangement.values()))[: _MOST_CURVES // 2]
    return best


def _at_rate(asked: PlanQuestion, candidate: Candidate, rows: Rows) -> RatePoint:
    result = asked.run(candidate, rows, asked.scenarios[1])
    names = ("ttft_p99_s", "tpot_p99_s", "goodput_fraction")
    return RatePoint(rate_per_s(rows), *(float(result[name]) for name in names))


def _placed(asked: PlanQuestion, one: Tried) -> Placed:
    result: Result = one.result
    rate = one.goodput * rate_per_s(asked.loads.first[: int(result["num_requests"])])
    gpus = one.candidate.num_instances * asked.device_of(one.candidate).gpus
    return Placed(one.candidate.name, float(result["e2e_p99_s"]), rate / gpus)
