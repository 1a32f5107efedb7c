"""Loads with even lengths and Poisson arrivals, and the rate at which a system is saturated."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.plan.search.trial import Device, Scenario

Draw = Callable[[random.Random], tuple[int, int]]
"""Function that draws prompt and output tokens of a request."""
AS_PREDICTED = Scenario(1.0, LatencyLimits())
"""Step times as predicted; the limits are of no matter."""
_AT_ONCE = 50
"""Requests of an instance, all at once: enough to fill the batches."""


def poisson_rows(
    draws: random.Random, duration_s: float, rate_per_s: float, lengths: Draw
) -> Iterator[Arrival]:
    """Yield requests that arrive in ``duration_s``, the first one at 0."""
    at_s = 0.0
    while at_s < duration_s:
        yield Arrival(at_s, *lengths(draws))
        at_s += draws.expovariate(rate_per_s)


def even_lengths(prompt: int, output: int) -> Draw:
    """Return a function that draws lengths within a fifth of these means."""

    def lengths(draws: random.Random) -> tuple[int, int]:
        return round(prompt * draws.uniform(0.8, 1.2)), round(output * draws.uniform(0.8, 1.2))

    return lengths


def saturation_per_s(device: Device, candidate: Candidate, lengths: Draw) -> float:
    """Return the simulated requests/s of a system whose requests all come at once."""
    draws = random.Random("saturation")
    rows = [Arrival(0.0, *lengths(draws)) for _ in range(_AT_ONCE * candidate.num_instances)]
    return float(device.run(candidate, rows, AS_PREDICTED)["requests_per_s"])
