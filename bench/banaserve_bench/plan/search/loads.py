"""Loads of a plan: one to choose candidates on, others to judge them on; idle engines' bounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival, cut
from banaserve_bench.simulation.job import SimulationJob

LEAST_REQUESTS = 30
"""Least number of requests of a load."""
_MOST_CUT = 0.01
"""Largest share of requests that are cut to the model's context."""
Rows = Sequence[Arrival]


class PlanLoads(NamedTuple):
    """Loads whose requests arrive alike.

    Attributes:
        first: Load on which candidates are chosen.
        others: Loads on which the chosen ones are judged, so that luck does not choose and judge.
        are_windows: True if all are parts of one trace, the first of which comes first.
    """

    first: Rows
    others: Sequence[Rows]
    are_windows: bool


def read_loads(planned: SimulationJob, seeds: range) -> PlanLoads:
    """Return a load for each of ``seeds`` and one more before them; of a trace, its parts.

    Raises:
        UserError: A load has too few requests or lasts no time, or more than a few requests are
            longer than the context.
    """
    if planned.is_drawn:
        loads = [_rows(planned, seed) for seed in range(seeds.start, seeds.stop + 1)]
    else:
        loads = _windows(_rows(planned, seeds.start), len(seeds) + 1)
    if min(map(len, loads)) < LEAST_REQUESTS:
        raise UserError(
            f"{planned.name} gives {min(map(len, loads))} requests for one of {len(loads)} loads: "
            f"{LEAST_REQUESTS} are needed: give fewer seeds or more requests"
        )
    if not all(rows[-1].at_s for rows in loads):
        raise UserError(
            f"all requests of one of {len(loads)} loads of {planned.name} arrive at once: give "
            "fewer seeds, or times of more digits"
        )
    most = planned.profile.model.max_context_tokens
    if (share := cut_share([row for rows in loads for row in rows], most)) > _MOST_CUT:
        raise UserError(
            f"{share:.0%} of the requests are longer than the context of {planned.profile.name}, "
            f"{most} tokens: give another --profile"
        )
    return PlanLoads(loads[0], loads[1:], not planned.is_drawn)


def cut_share(rows: Rows, most: int) -> float:
    """Return the share of requests that fill the context, as those do that were cut to it."""
    return sum(row.prompt_tokens + row.output_tokens >= most for row in rows) / len(rows)


def longer(rows: Rows, scale: float, most: int) -> list[Arrival]:
    """Return requests with prompts ``scale`` times as long, cut to a context of ``most`` tokens."""
    found = []
    for row in rows:
        prompt, output = cut(max(1, round(scale * row.prompt_tokens)), row.output_tokens, most)
        found.append(Arrival(row.at_s, prompt, output))
    return found


def faster(rows: Rows, scale: float) -> list[Arrival]:
    """Return requests that arrive at ``scale`` times the rate."""
    return [Arrival(row.at_s / scale, *row[1:]) for row in rows]


def rate_per_s(rows: Rows) -> float:
    """Return the mean rate of arrivals, in requests per second."""
    return len(rows) / rows[-1].at_s if rows[-1].at_s else float("inf")


def mean_prompt(rows: Rows) -> float:
    """Return the mean number of prompt tokens."""
    return sum(row.prompt_tokens for row in rows) / len(rows)


def feasible_share(rows: Rows, costs: StepCosts, limits: LatencyLimits) -> float:
    """Return the share of requests that an idle engine serves within the limits.

    Raises:
        UserError: There is none; the message has the bound.
    """
    ttft_s = [_ttft_s(row, costs) for row in rows]
    tpot_s = [_tpot_s(row, costs) for row in rows]
    for name, times_s, limit_s in (
        ("ttft", ttft_s, limits.ttft_s),
        ("tpot", tpot_s, limits.tpot_s),
    ):
        if min(times_s) > limit_s:
            raise UserError(
                f"--slo-{name} {limit_s:g}: an idle engine takes {min(times_s):.3g} s or more "
                "for every request: give a longer limit"
            )
    within = [
        a <= limits.ttft_s and b <= limits.tpot_s for a, b in zip(ttft_s, tpot_s, strict=True)
    ]
    if not any(within):
        raise UserError("no request is within both limits on an idle engine: give longer ones")
    return sum(within) / len(within)


def _ttft_s(row: Arrival, costs: StepCosts) -> float:
    # A prompt with known prefixes may be cached but for one token.
    tokens = 1 if row.hash_ids else row.prompt_tokens
    return costs.mixed_s(tokens, tokens * tokens, 0, 0)[0]


def _tpot_s(row: Arrival, costs: StepCosts) -> float:
    return costs.mixed_s(0, 0, 1, row.prompt_tokens)[0] if row.output_tokens > 1 else 0.0


def _rows(planned: SimulationJob, seed: int) -> list[Arrival]:
    return [
        Arrival(one.arrival_s, one.prompt_tokens, one.output_tokens, tuple(one.hash_ids))
        for one in planned.requests(seed)
    ]


def _windows(rows: Rows, number: int) -> list[list[Arrival]]:
    """Return ``number`` parts of a trace with equally many requests, each from time 0 on."""
    size = len(rows) // number
    parts = [rows[place * size : (place + 1) * size] for place in range(number)]
    return [[Arrival(row.at_s - part[0].at_s, *row[1:]) for row in part] for part in parts]
