"""Twelve arrangements of real engines on a CPU, and what the simulator predicts of them. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.search.candidates import Candidate, colocated, split
from banaserve_bench.plan.search.trial import Device, Scenario
from benchmarks.plan.foreseen import ForeseenSystem, kept
from benchmarks.plan.loads import AS_PREDICTED, even_lengths, poisson_rows, saturation_per_s

_STEPS = (2048, 256)
_LOADS = ((100, 40, 0.3), (100, 40, 0.55), (250, 20, 0.3), (250, 20, 0.55))
"""Mean prompt and output tokens, near what a probe reaches, and shares of simulated saturation."""


class CpuArrangement(NamedTuple):
    """System on real engines, and its load.

    Attributes:
        fraction: Rate as a share of the system's simulated saturation.
    """

    candidate: Candidate
    prompt_tokens: int
    output_tokens: int
    fraction: float

    @property
    def name(self) -> str:
        """Words that no other arrangement has."""
        lengths = f"{self.prompt_tokens}/{self.output_tokens} tokens"
        return f"{self.candidate.name}, {lengths}, {self.fraction:g} of saturation"

    def rows(self, device: Device, duration_s: float, neighbour_factor: float) -> list[Arrival]:
        """Return the requests that arrive in ``duration_s`` at the rate of this arrangement."""
        lengths = even_lengths(self.prompt_tokens, self.output_tokens)
        rate_per_s = self.fraction * saturation_per_s(device, self.candidate, lengths)
        if self.candidate.num_instances > 1:
            rate_per_s /= neighbour_factor  # when saturated, both engines are always busy
        draws = random.Random(self.name)
        return [*poisson_rows(draws, duration_s, rate_per_s, lengths)]


def cpu_arrangements() -> Iterator[CpuArrangement]:
    """Yield the twelve arrangements; those of one system follow each other."""
    systems = [
        make
        for steps in _STEPS
        for make in (
            colocated(1, steps, store=False),
            colocated(2, steps, store=False),
            split(1, 1, steps),
        )
    ]
    for number, candidate in enumerate(systems):
        # Each system has a load of short prompts and one of long ones, at the same share.
        for load in _LOADS[number % 2 :: 2]:
            yield CpuArrangement(candidate, *load)


def foreseen_system(
    device: Device, one: CpuArrangement, rows: list[Arrival], neighbour_factor: float
) -> ForeseenSystem:
    """Return the prediction for a load.

    Engines that share a machine's memory slow each other down: step times are longer by the share
    of the time in which the other engine is busy, which a first run tells.

    Args:
        neighbour_factor: Factor of an engine's times while another one is busy all the time.
    """
    found = device.run(one.candidate, rows, AS_PREDICTED)
    if one.candidate.num_instances > 1:
        factor = 1 + (neighbour_factor - 1) * found["busy_fraction"]
        found = device.run(one.candidate, rows, Scenario(factor, LatencyLimits()))
    return ForeseenSystem(one.candidate.name, kept(found))
