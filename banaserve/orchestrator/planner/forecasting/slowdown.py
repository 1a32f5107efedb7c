"""Throughput that one forecast loses relative to another forecast of the same requests.

In an overload, latency limits alone do not show this loss: an arrangement that serves some requests
well and falls behind with the others looks better than one that keeps up, until the load ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf

from banaserve.orchestrator.planner.forecasting.forecast import Forecast

_BEGINNING = 0.25
"""Share of the arrivals' time that is left out: its queues are those of the present arrangement."""


def slowdown(one: Forecast, other: Forecast) -> float:
    """Return how much slower ``one`` works than ``other``, as a share of time; below 0 if faster.

    The result is the slope, over the arrival times, of the difference between the k-th end in
    ``one`` and the k-th end in ``other``, whichever requests these are. It is 0 if both keep up
    with the load, however long each request takes, and if one lets a few requests wait that the
    other does not. If it is larger in absolute value, the result is instead the share of requests
    that do not end in ``one``, minus the share that do not end in ``other``.
    """
    begin_s = _BEGINNING * max(one.arrivals_s, default=0.0)
    places = [place for place, at_s in enumerate(one.arrivals_s) if at_s > begin_s]
    own, others = (sorted(told.ends_s[place] for place in places) for told in (one, other))
    arrivals_s: list[float] = []
    later_s: list[float] = []
    num_lost = 0
    for place, own_s, other_s in zip(places, own, others, strict=True):
        num_lost += isinf(own_s) - isinf(other_s)
        if not isinf(own_s) and not isinf(other_s):
            arrivals_s.append(one.arrivals_s[place])
            later_s.append(own_s - other_s)
    lost = num_lost / len(places) if places else 0.0
    return max(_slope(arrivals_s, later_s), lost, key=abs)


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through these points; 0 if all x are equal."""
    if not x:
        return 0.0
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    if spread <= 0:
        return 0.0
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
