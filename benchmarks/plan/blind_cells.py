"""Cells of the blind comparison: a load, its limits, and the paced engines that serve it. Pure.

The cells are a covering subset of all combinations, drawn by a fixed seed before anything has run.
Rates are shares of the simulated saturation of colocated instances, and limits are multiples of
what a request takes on an idle engine.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import ErrorSection
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.candidates import MOST_STEP_TOKENS, colocated
from banaserve_bench.plan.search.loads import PlanLoads
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.trial import Device, StepError
from benchmarks.elastic.cells import covering
from benchmarks.plan.loads import even_lengths, poisson_rows, saturation_per_s

NUM_CELLS = 24
_PROFILES = ("opt-13b-a100", "llama-3.1-8b-h100", "llama-3.1-70b-h100-tp4")
_INSTANCES = (2, 3, 4)
_LENGTHS = ((300, 100), (800, 60), (1200, 100), (1600, 40))
"""Mean prompt and output tokens; with a fifth more they fit into the shortest context, 2,048."""
_FRACTIONS = (0.4, 0.6, 0.8)
_LIMITS = ((8.0, 1.5), (8.0, 3.0), (3.0, 2.0))
"""Limits of TTFT and TPOT, as multiples of those of a request on an idle engine."""
_DILATIONS = {
    "opt-13b-a100": (2.0, 3.0),
    "llama-3.1-8b-h100": (5.0, 8.0),
    "llama-3.1-70b-h100-tp4": (2.5, 4.0),
}
"""Wall seconds of a modelled second that two cores can keep, for two instances and for more."""
_ERROR = ErrorSection(ttft=0.07, tpot=0.012, latency=0.012)
"""Mean errors of the simulator on paced engines that were known before: TTFT of a split in
``results/pacing.json`` at dilation 4, TPOT of colocated engines in ``results/elastic-paced.json``.
Paced engines keep the profile's step times, so that these have no error of their own."""
_NUM_LOADS = 10
_REQUESTS = 150
"""Requests of a load, unless they take longer than the load may last."""


class BlindCell(NamedTuple):
    """A load on paced engines.

    Attributes:
        fraction: Rate as a share of the simulated saturation of colocated instances.
        ttft_times: Limit of TTFT as a multiple of that of a mean prompt on an idle engine.
        tpot_times: Limit of TPOT as a multiple of that of a request on an idle engine.
    """

    profile: str
    instances: int
    prompt_tokens: int
    output_tokens: int
    fraction: float
    ttft_times: float
    tpot_times: float

    @property
    def name(self) -> str:
        """Words that no other cell has."""
        return (
            f"{self.profile} x {self.instances}, {self.prompt_tokens}/{self.output_tokens} tokens, "
            f"{self.fraction:g} of saturation, limits {self.ttft_times:g} and {self.tpot_times:g} "
            "times idle"
        )

    @property
    def dilation(self) -> float:
        """Wall seconds of a modelled second."""
        return _DILATIONS[self.profile][self.instances > 2]


def blind_cells() -> list[BlindCell]:
    """Return all cells, in the order in which they are asked."""
    levels = (_PROFILES, _INSTANCES, _LENGTHS, _FRACTIONS, _LIMITS)
    rows = covering(levels, NUM_CELLS, "blind cells of the advisor")
    return [
        BlindCell(profile, instances, prompt, output, fraction, ttft, tpot)
        for profile, instances, (prompt, output), fraction, (ttft, tpot) in rows
    ]


def question(cell: BlindCell, most_load_s: float) -> PlanQuestion:
    """Return what the advisor is asked; the engines get the first of the loads that judge.

    Args:
        most_load_s: Longest time in which the requests of a load arrive, in wall seconds.
    """
    device = Device(profiles.load(cell.profile))
    lengths = even_lengths(cell.prompt_tokens, cell.output_tokens)
    usual = colocated(cell.instances, store=False)
    rate_per_s = cell.fraction * saturation_per_s(device, usual, lengths)
    duration_s = min(most_load_s / cell.dilation, _REQUESTS / rate_per_s)
    loads = [
        [*poisson_rows(random.Random(f"{cell.name} {n}"), duration_s, rate_per_s, lengths)]
        for n in range(_NUM_LOADS + 1)
    ]
    return PlanQuestion(
        device=device,
        profile_name=cell.profile,
        error=StepError.of(_ERROR),
        limits=_limits(cell, device),
        loads=PlanLoads(loads[0], loads[1:], are_windows=False),
        instances=cell.instances,
        max_step_tokens=MOST_STEP_TOKENS,
    )


def _limits(cell: BlindCell, device: Device) -> LatencyLimits:
    prompt = cell.prompt_tokens
    ttft_s, _ = device.costs.mixed_s(prompt, prompt * prompt, 0, 0)
    tpot_s, _ = device.costs.mixed_s(0, 0, 1, prompt)
    return LatencyLimits(cell.ttft_times * ttft_s, cell.tpot_times * tpot_s)
