"""Arrival times of requests: seconds from the start of a run, ascending."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known

KINDS = ("closed", "gamma", "poisson", "trace")


def poisson(rate_per_s: float, count: int, seed: int) -> list[float]:
    """Return arrivals of a Poisson process: exponential gaps of mean 1 / rate."""
    return gamma(rate_per_s, 1.0, count, seed)


def gamma(rate_per_s: float, variation: float, count: int, seed: int) -> list[float]:
    """Return bursty (or smooth) arrivals: gamma-distributed gaps of mean 1 / rate.

    Args:
        variation: Coefficient of variation of the gaps: 1 is Poisson, above 1 is bursty.

    Raises:
        UserError: A rate that is not above 0, or a variation that is out of range.
    """
    if rate_per_s <= 0:
        raise UserError(f"a rate of {rate_per_s} requests/s: give more than 0")
    if not 1e-3 <= variation <= 1e3:
        raise UserError(f"a variation of {variation}: give a number in [0.001, 1000]")
    shape = variation**-2
    gaps_s = np.random.default_rng(seed).gamma(shape, 1 / (rate_per_s * shape), size=count)
    return [float(at_s) for at_s in np.cumsum(gaps_s)]


def trace(times_s: Sequence[float], count: int, rate_per_s: float | None = None) -> list[float]:
    """Return the first ``count`` recorded arrivals from 0 on, stretched to ``rate_per_s`` if given.

    Raises:
        UserError: The trace is too short, or has no duration to stretch.
    """
    if len(times_s) < count:
        raise UserError(f"the trace has {len(times_s)} arrivals, {count} are asked")
    first = sorted(times_s)[:count]
    from_start_s = [at_s - first[0] for at_s in first]
    if rate_per_s is None or count < 2:
        return from_start_s
    if rate_per_s <= 0 or from_start_s[-1] <= 0:
        raise UserError("a trace can be stretched to a rate above 0 if it lasts longer than 0 s")
    factor = (count - 1) / rate_per_s / from_start_s[-1]
    return [at_s * factor for at_s in from_start_s]


def arrival_times_s(
    kind: str,
    count: int,
    *,
    seed: int = 0,
    rate_per_s: float | None = None,
    variation: float = 1.0,
    trace_s: Sequence[float] | None = None,
) -> list[float] | None:
    """Return ``count`` arrival times of ``kind``, or None for ``closed``.

    A closed loop has no arrival times: a request is sent when an earlier one has ended.

    Raises:
        UserError: The kind is unknown, or lacks its rate or its trace.
    """
    check_known("arrival kind", kind, KINDS)
    if kind == "closed":
        return None
    if kind == "trace":
        if trace_s is None:
            raise UserError("arrivals from a trace need a file with times")
        return trace(trace_s, count, rate_per_s)
    if rate_per_s is None:
        raise UserError(f"{kind} arrivals need a rate in requests/s")
    return gamma(rate_per_s, 1.0 if kind == "poisson" else variation, count, seed)
