"""Runs of BanaServe's figures 8 to 11 in the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from random import Random

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, Tally, summary
from banaserve.sim.system import System, following, preset
from banaserve.sim.trace import cut
from banaserve_bench.simulation.lengths import draw_measured
from banaserve_bench.simulation.run import simulate
from banaserve_bench.simulation.workload import Arrivals, arriving

RATES = (1, 6, 12, 20)
SEEDS = (1, 2, 3, 4, 5)
WARM_S, MEASURED_S = 60.0, 120.0
MAX_OUTPUT_TOKENS = 512
LIMIT_FACTOR = 5.0
"""Limits of TTFT and TPOT of a request in time, over their means where a request is alone."""

_NUM_ALONE = 200
"""Number of requests that give those means."""

READINGS = {
    "reference": "answers are as long as the dataset's reference answers, 512 tokens at most",
    "capped": "every answer runs to the cap of 512 tokens, as a base model that nothing stops",
}


@dataclass(frozen=True)
class PaperFigure:
    """A figure of the paper and its claims; ratios are (lowest, highest)."""

    number: int
    model: str
    profile: str
    dataset: str
    over_static: tuple[float, float]
    over_colocated: tuple[float, float]

    @property
    def name(self) -> str:
        return f"figure {self.number}: {self.model}, {self.dataset}"


FIGURES = (
    PaperFigure(8, "Llama-13B", "llama-13b-a100", "alpaca", (1.1, 1.2), (1.1, 1.2)),
    PaperFigure(9, "OPT-13B", "opt-13b-a100", "alpaca", (2.8, 3.9), (1.0, 3.9)),
    PaperFigure(10, "Llama-13B", "llama-13b-a100", "longbench", (1.3, 1.5), (1.0, 1.5)),
    PaperFigure(11, "OPT-13B", "opt-13b-a100", "longbench", (1.1, 1.3), (1.0, 1.3)),
)

_FIXED: dict[str, System] = {
    "colocated": preset("colocated", colocated=4),
    "static": preset("static", prefill=2, decode=2),
    "banaserve": preset("banaserve", prefill=2, decode=2),
}

SYSTEMS = (*_FIXED, "elastic")
"""Four GPUs each: vLLM on every one, DistServe at 2:2, the repaired policy from 2:2, and the
elastic policy from four that do both, as ``banaserve simulate`` compares them."""

_SPLIT: dict[str, System] = {
    f"{kind} {prefill}:{decode}": preset(kind, prefill=prefill, decode=decode)
    for prefill, decode in ((1, 3), (3, 1))
    for kind in ("static", "banaserve")
}

SPLITS = tuple(_SPLIT)
"""Systems at the highest rate only: the cost of a bad split of the GPUs, and of starting there."""


@dataclass(frozen=True)
class PaperRun:
    """A simulation."""

    figure: int
    reading: str
    system: str
    rate_per_s: float
    seed: int


def all_runs() -> Iterator[PaperRun]:
    for figure in FIGURES:
        for reading in READINGS:
            for seed in SEEDS:
                for rate in RATES:
                    for name in SYSTEMS:
                        yield PaperRun(figure.number, reading, name, rate, seed)
                for name in SPLITS:
                    yield PaperRun(figure.number, reading, name, RATES[-1], seed)


def lengths(dataset: str, reading: str, draws: Random) -> tuple[int, int]:
    prompt = round(draw_measured(f"{dataset}_prompt", draws))
    if reading == "capped":
        return prompt, MAX_OUTPUT_TOKENS
    return prompt, min(MAX_OUTPUT_TOKENS, round(draw_measured(f"{dataset}_output", draws)))


@cache
def limits_of(figure: PaperFigure, reading: str) -> LatencyLimits:
    """Return the limits within which a request counts as in time: one rule for all cells.

    Both are ``LIMIT_FACTOR`` times the mean of requests that one engine serves one at a time.
    """
    profile, draws = load_profile(figure.profile), Random("requests that are alone")
    far_apart_s = 1e4
    alone = []
    for number in range(_NUM_ALONE):
        pair = lengths(figure.dataset, reading, draws)
        row = cut(*pair, profile.model.max_context_tokens)
        alone.append(SimRequest(number, number * far_apart_s, *row))
    found = simulate(profile, preset("colocated", colocated=1), alone)
    return LatencyLimits(LIMIT_FACTOR * found["ttft_mean_s"], LIMIT_FACTOR * found["tpot_mean_s"])


def system_of(figure: PaperFigure, reading: str, name: str) -> System:
    """Return one of ``SYSTEMS`` or ``SPLITS``; only the elastic one knows the limits."""
    if name != "elastic":
        return (_FIXED | _SPLIT)[name]
    limits = limits_of(figure, reading)
    return following(preset("elastic", colocated=4), figure.profile, limits.ttft_s, limits.tpot_s)


def measure(run: PaperRun) -> dict[str, float]:
    """Simulate ``run``.

    Returns:
        Tokens a second while requests arrive, after the warm-up; the time from the start to the
        last token of all; of the requests that arrived after the warm-up, mean latency and the
        share within the limits of the cell.
    """
    figure = next(f for f in FIGURES if f.number == run.figure)
    profile = load_profile(figure.profile)
    arrivals = Arrivals(duration_s=WARM_S + MEASURED_S, rate_per_s=run.rate_per_s)
    pair = partial(lengths, figure.dataset, run.reading)
    requests = arriving(arrivals, pair, run.seed, profile.model.max_context_tokens)
    clusters: list[SimCluster] = []
    system = system_of(figure, run.reading, run.system)
    outcome = simulate(profile, system, requests, watch=clusters.append)
    if outcome["num_finished"] != outcome["num_requests"]:
        raise UserError(f"{run}: {outcome['num_requests'] - outcome['num_finished']} never ended")
    everyone = clusters[0].finished
    arrived = [r for r in everyone if r.arrival_s >= WARM_S]
    served = [(r.arrival_s, r.first_s, r.end_s, r.output_tokens) for r in arrived]
    told = summary(Tally(len(arrived), served=served), limits_of(figure, run.reading))
    return {
        "tokens_per_s": sum(_in_window(r) for r in everyone) / MEASURED_S,
        "offered_tokens_per_s": sum(r.output_tokens for r in arrived) / MEASURED_S,
        "total_s": outcome["total_s"],
        "goodput_fraction": told["goodput_fraction"],
        "latency_s": told["e2e_mean_s"],
    }


def _in_window(request: SimRequest) -> float:
    """Return the output tokens that came after the warm-up while requests still arrived.

    Tokens count as evenly spread between the first and the last.
    """
    start_s, end_s = WARM_S, WARM_S + MEASURED_S
    is_first_inside = start_s <= request.first_s < end_s
    if request.output_tokens == 1:
        return float(is_first_inside)
    lasts_s = request.end_s - request.first_s
    inside_s = min(end_s, request.end_s) - max(start_s, request.first_s)
    share = max(0.0, inside_s) / lasts_s
    return is_first_inside + share * (request.output_tokens - 1)
