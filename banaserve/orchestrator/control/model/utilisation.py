"""Pressure of loads, and efficiency of actions that relieve it: BanaServe Eqs. 1 and 35."""

from __future__ import annotations


def published_efficiency(gap_before: float, gap_after: float, cost_s: float) -> float:
    """Return benefit / cost of BanaServe Eq. 35, in 1/s: the fall of Eq. 34's gap per second."""
    return (gap_before - gap_after) / cost_s


PRESSURE_POWER = 4
"""Exponent of ``pressure``: just steep enough that the fullest resources decide."""


def pressure(load: float) -> float:
    """Return the contribution of one resource at ``load`` to the objective: U^4 / 4.

    It replaces the maximum of Eq. 1, which does not fall when one of two equal maxima is relieved.
    Figure 2(b) is such a case: compute of one instance and memory of the other are both at 0.95. A
    sum of convex terms falls with each useful move, so that the repaired algorithm terminates, and
    is close to the maximum if one term is far above the rest. Relief counts in full at load 1 and
    one eighth at load 1/2. The load is not limited to 1: waiting work is load, too.
    """
    return load**PRESSURE_POWER / PRESSURE_POWER


def efficiency(pressure_fall: float, horizon_s: float, cost_s: float) -> float:
    """Return benefit / cost of BanaServe Eq. 35, corrected: both in seconds.

    The benefit is the fall of the pressure over ``horizon_s``, the expected duration of the load;
    the fall of the pair's gap in Eq. 35 may leave the fullest instance as full as before.
    """
    return pressure_fall * horizon_s / cost_s if cost_s > 0 else float("inf")
