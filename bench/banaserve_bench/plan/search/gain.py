"""Gain of one system over another with its interval, and the verdict that follows. Pure.

The interval has two causes. Loads differ: the ratio of sums over paired runs has a 95% interval.
Step times are wrong: the lower end is of runs in which the system is slower by their error and the
other one faster, the upper end the other way round. Steps of one kind and mixed steps may be wrong
in opposite directions, so their errors are not taken to cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from banaserve_bench.results.statistics import Interval, mean_interval

WORTH = 1.05
"""Least gain that pays for a split: a smaller one is no reason to run it."""
MOST_RATIO = 1000.0
_BISECTIONS = 40
_ABOVE_1 = 1.005
"""Bound that is above 1 with the two decimals that are shown, too."""


class Answer(StrEnum):
    """Answer to the question whether another system than the colocated one pays."""

    YES = "yes"
    NO = "no"
    CANNOT_TELL = "can't tell"


class GoodputRuns(NamedTuple):
    """Shares of requests within the limits, one for each load, at three step times.

    Attributes:
        slow: Shares if step times are longer than predicted, by their error.
        fast: Shares if step times are shorter, by their error.
    """

    slow: Sequence[float]
    predicted: Sequence[float]
    fast: Sequence[float]


class Gain(NamedTuple):
    """Ratio of the numbers of requests within the limits of two systems.

    Attributes:
        whole: Interval by loads and errors of step times.
        of_loads: Interval by loads alone, as if step times were right.
    """

    whole: Interval
    of_loads: Interval


def gain(own: GoodputRuns, other: GoodputRuns, num_requests: Sequence[int]) -> Gain:
    """Return the gain of ``own`` over ``other``, whose runs are of the same loads.

    Args:
        num_requests: Number of requests of each load, at least two loads.
    """

    def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
        own_good = [share * number for share, number in zip(above, num_requests, strict=True)]
        # Half a request stands for none.
        other_good = [max(a * n, 0.5) for a, n in zip(below, num_requests, strict=True)]
        return ratio_interval(own_good, other_good)

    of_loads = ratio(own.predicted, other.predicted)
    low = min(ratio(own.slow, other.fast).low, of_loads.low)
    high = max(ratio(own.fast, other.slow).high, of_loads.high)
    return Gain(Interval(low, of_loads.estimate, high), of_loads)


def gain_of_one_load(own: GoodputRuns, other: GoodputRuns, num_requests: int) -> Gain:
    """Return the gain of ``own`` over ``other`` on one load, whose spread is unknown."""

    def ratio(above: Sequence[float], below: Sequence[float]) -> float:
        # Half a request stands for none, as in ``gain``.
        return min(MOST_RATIO, above[0] / max(below[0], 0.5 / num_requests))

    estimate = ratio(own.predicted, other.predicted)
    low = min(estimate, ratio(own.slow, other.fast))
    high = max(estimate, ratio(own.fast, other.slow))
    return Gain(Interval(low, estimate, high), Interval(estimate, estimate, estimate))


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Return the ratio of the sums of pairs with its 95% interval, by Fieller's theorem.

    The interval has the ratios r at which the mean of a - r b may be 0; it ends at most at
    ``MOST_RATIO``.
    """
    estimate = sum(above) / sum(below)

    def is_possible(ratio: float) -> bool:
        rests = [a - ratio * b for a, b in zip(above, below, strict=True)]
        low, _, high = mean_interval(rests)
        return low <= 0 <= high

    def end(outside: float) -> float:
        if is_possible(outside):
            return outside
        inside = estimate
        for _ in range(_BISECTIONS):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_possible(middle) else (inside, middle)
        return inside

    return Interval(end(0.0), estimate, end(max(MOST_RATIO, estimate)))


def answer(found: Gain, is_error_known: bool) -> Answer:
    """Return the verdict: no where no gain would pay, yes only where the interval is above 1."""
    if not is_error_known:
        return Answer.CANNOT_TELL
    if found.whole.high < WORTH:
        return Answer.NO
    return Answer.YES if found.whole.low > _ABOVE_1 else Answer.CANNOT_TELL
