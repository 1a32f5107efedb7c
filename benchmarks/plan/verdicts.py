"""Verdict on a split by measured means, and the advisor's by simulated ones. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from typing import NamedTuple

from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.gain import MOST_RATIO, WORTH, Answer, Gain
from banaserve_bench.results.statistics import Interval
from benchmarks.plan.runs import ServedRun

_NEAR = 2.0
"""Largest ratio of the numbers of clients of two runs between which means change evenly."""


class Means(NamedTuple):
    """Mean TTFT and TPOT of a run, in seconds."""

    ttft_s: float
    tpot_s: float

    def between(self, other: Means, share: float) -> Means:
        """Return the means at ``share`` of the way to ``other``, in logarithms."""
        return Means(*(a * (b / a) ** share for a, b in zip(self, other, strict=True)))

    def share_to(self, other: Means, limits: LatencyLimits) -> float:
        """Return the share of the way to ``other`` at which a limit is met, at most 1."""
        pairs = zip((limits.ttft_s, limits.tpot_s), self, other, strict=True)
        return min([1.0, *(log(limit / a) / log(b / a) for limit, a, b in pairs if b > limit)])

    def is_within(self, limits: LatencyLimits) -> bool:
        """Return whether both means are within the limits."""
        return self.ttft_s <= limits.ttft_s and self.tpot_s <= limits.tpot_s


MeansOf = Mapping[str, Means]
"""Means of runs by their ids."""


class BestRates(NamedTuple):
    """Most output tokens per second and GPU of a split and of aggregated engines; 0 for none."""

    split: float
    aggregated: float

    @classmethod
    def of(cls, runs: Sequence[ServedRun], means: MeansOf, limits: LatencyLimits) -> BestRates:
        """Return the best rates of both kinds of runs with these means, within the limits."""
        return cls(*(_best(runs, is_split, means, limits) for is_split in (True, False)))

    @property
    def are_known(self) -> bool:
        """True if both kinds have a run within the limits."""
        return min(self) > 0


def right_answer(ratio: float) -> Answer:
    """Return whether a split pays that has ``ratio`` times as much as aggregated engines."""
    return Answer.YES if ratio >= WORTH else Answer.NO


def gain(slow: BestRates, predicted: BestRates, fast: BestRates) -> Gain:
    """Return the gain of a split, by rates at three step times, as ``plan.search.gain`` has it.

    A kind without a run within the limits could still serve fewer clients, and no run tells how
    much: its rate is then unknown, and may be the worse for the end of the interval.
    """
    estimate = _ratio(predicted.split, predicted.aggregated, unknown=1.0)
    low = _ratio(slow.split, fast.aggregated, unknown=0.0)
    high = _ratio(fast.split, slow.aggregated, unknown=MOST_RATIO)
    whole = Interval(min(low, estimate), estimate, max(high, estimate))
    return Gain(whole, Interval(estimate, estimate, estimate))


def _ratio(above: float, below: float, unknown: float) -> float:
    return min(MOST_RATIO, above / below) if above and below else unknown


def _best(
    runs: Sequence[ServedRun], is_split: bool, means: MeansOf, limits: LatencyLimits
) -> float:
    same: dict[tuple[object, ...], list[ServedRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.clients):
        if run.is_split is is_split:
            same[run.version, run.prefill, run.engines].append(run)
    return max((rate for of in same.values() for rate in _rates(of, means, limits)), default=0.0)


def _rates(runs: Sequence[ServedRun], means: MeansOf, limits: LatencyLimits) -> Iterator[float]:
    """Yield rates of runs of the same engines within the limits, also between two runs.

    With at most twice as many clients, means are taken to change evenly in logarithms: any number
    of clients in between can be chosen.
    """
    for place, run in enumerate(runs):
        own = means[run.id]
        if not own.is_within(limits):
            continue
        yield run.rate(*own)
        if place + 1 < len(runs) and runs[place + 1].clients <= _NEAR * run.clients:
            more = runs[place + 1]
            share = own.share_to(means[more.id], limits)
            clients = (more.clients / run.clients) ** share
            yield run.rate(*own.between(means[more.id], share)) * clients
