"""Pressure of loads, and efficiency of what relieves them: BanaServe Eqs. 1 and 35."""

from __future__ import annotations


def published_efficiency(gap_before: float, gap_after: float, cost_s: float) -> float:
    """Benefit / cost of BanaServe Eq. 35, in 1/s: the gap of Eq. 34 that closes, a second."""
    return (gap_before - gap_after) / cost_s


PRESSURE_POWER = 4
"""Steep enough that the fullest resources decide, and no steeper: see ``pressure``."""


def pressure(load: float) -> float:
    """What one resource at ``load`` adds to the objective: U^4 / 4 (stands in for Eq. 1).

    The maximum of Eq. 1 does not fall when one of two equal maxima is relieved, which is figure
    2(b): compute of one instance and memory of the other are both at 0.95. A sum of convex terms
    falls with each useful move, which makes the repaired algorithm terminate, and is nearly the
    maximum where one is far above the rest. Relief counts in full at load 1 and an eighth of it
    at load 1/2. Not cut at 1: what waits is load too.
    """
    return load**PRESSURE_POWER / PRESSURE_POWER


def efficiency(pressure_fall: float, horizon_s: float, cost_s: float) -> float:
    """Benefit / cost of BanaServe Eq. 35, corrected: both in seconds.

    The benefit is the fall of the pressure over ``horizon_s``, for which the load is expected to
    last; Eq. 35's fall of the pair's gap may leave the fullest instance as full as it was.
    """
    return pressure_fall * horizon_s / cost_s if cost_s > 0 else float("inf")
