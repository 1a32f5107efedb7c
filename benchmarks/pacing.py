"""Accuracy with which paced engines keep the time of the GPU that they model.

``python -m benchmarks pacing``. The same requests, drawn once, go to a paced cluster at several
dilations, and through the simulator, which gives what the model predicts for them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from banaserve.base.arguments import positive
from banaserve.base.config.serve_config import MINIATURE, parse_pd
from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.pacing.step_log import PacedStep, readers
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.loadgen import arrivals
from banaserve_bench.loadgen.client import OpenAiClient, RequestRecord
from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.results.result import ModelledTime, Result
from banaserve_bench.results.statistics import median, percentile
from banaserve_bench.serving.simulated_requests import CaseRequest, send
from banaserve_bench.serving.summary import tpot_s
from banaserve_bench.simulation.run import simulate
from benchmarks.measurement import Measurement, Samples, administered_server, parser_of, progress_of

_TOKEN_IDS = (500, 40_000)
_WARM_UP = 4
_NOTES = (
    "xN: dilation N, one modelled second takes N s; ttft and tpot are modelled seconds",
    "step_error: what a step took against what the model gives for it, one sample an "
    "instance; steps end late, never early",
    "overrun_fraction: steps whose real work took longer than their modelled time",
    "work_fraction: real work, the engine's own code included, of all modelled time",
    "vs_simulated: median against the simulator's for the same requests, roles static; it "
    "routes by its own view and lets no step wait for a request that is handed over",
)
PacedRequest = CaseRequest


@dataclass(frozen=True, slots=True)
class PacedRun:
    """Outcome of one dilation.

    Attributes:
        steps: Steps of the measured requests, by instance.
        overrun_fractions: Fraction of these steps that overran, by instance.
    """

    dilation: float
    records: list[RequestRecord]
    steps: dict[str, list[PacedStep]]
    overrun_fractions: dict[str, float]
    modelled: ModelledTime


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("pacing", given)
    measurement.deliver(asyncio.run(_measure(given, measurement)))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("pacing", __doc__)
    add = parser.add_argument
    add("--profile", default="opt-13b-a100", help="name or .toml file")
    add("--pd", default="2:2", metavar="P:D")
    add("--dilations", type=float, nargs="+", default=[1.0, 2.0, 4.0], metavar="N")
    add("--requests", type=positive, default=64)
    add("--rate", type=float, default=6.0, help="requests a modelled second")
    add("--prompt-tokens", type=int, nargs=2, default=[64, 768], metavar=("LEAST", "MOST"))
    add("--output-tokens", type=int, nargs=2, default=[16, 96], metavar=("LEAST", "MOST"))
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    for name in ("prompt_tokens", "output_tokens"):
        least, most = getattr(given, name)
        if not 2 <= least <= most:
            raise UserError(f"--{name.replace('_', '-')} {least} {most}: at least 2, and ascending")
    parse_pd(given.pd)
    return given


def draw(given: argparse.Namespace) -> list[PacedRequest]:
    draws = random.Random(given.seed)
    times_s = arrivals.poisson(given.rate, given.requests, given.seed)
    return [
        PacedRequest(
            at_s,
            draws.choices(range(*_TOKEN_IDS), k=draws.randint(*given.prompt_tokens)),
            draws.randint(*given.output_tokens),
        )
        for at_s in times_s
    ]


def predicted(profile: Profile, pd: str, asks: Sequence[PacedRequest]) -> dict[str, Any]:
    """Return the simulator's result for the same requests: static roles, one store."""
    prefill, decode = parse_pd(pd)
    system = preset("banaserve", prefill=prefill, decode=decode, migration="still")
    requests = (
        SimRequest(number, ask.at_s, len(ask.prompt), ask.output_tokens)
        for number, ask in enumerate(asks)
    )
    return simulate(profile, system, requests)


async def _measure(given: argparse.Namespace, measurement: Measurement) -> Result:
    profile = profiles.load(given.profile)
    asks = draw(given)
    figures: Samples = {}
    runs = []
    simulated = predicted(profile, given.pd, asks)
    with progress_of(len(given.dilations), "starting") as advance:
        for dilation in given.dilations:
            runs.append(await _run(given, profile, asks, dilation))
            figures |= figures_of(runs[-1], simulated)
            advance(f"dilation {dilation:g} has run")
    return measurement.result(
        figures,
        _NOTES,
        raw={"simulated": simulated, "instances": [sorted(run.steps) for run in runs]},
        modelled_time=[run.modelled for run in runs],
    )


async def _run(
    given: argparse.Namespace, profile: Profile, asks: Sequence[PacedRequest], dilation: float
) -> PacedRun:
    options = ("--pace", given.profile, "--dilate", str(dilation), "--pd", given.pd)
    with administered_server(MINIATURE, *options) as (server, _, run_dir):
        async with OpenAiClient(server.url, f"paced-{profile.name}") as client:
            warm_up = [PacedRequest(0.0, ask.prompt[::-1], 8) for ask in asks[:_WARM_UP]]
            await send(client, warm_up, dilation)
            before = {log.instance_id: log.sums() for log in readers(run_dir)}
            records = [one.checked() for one in await send(client, asks, dilation)]
        told = modelled_time(server.url)
        assert told is not None
        steps, overrun = {}, {}
        for log in readers(run_dir):
            first, sums = before[log.instance_id], log.sums()
            steps[log.instance_id] = log.steps(since=first.num_steps)
            num_steps = max(1, sums.num_steps - first.num_steps)
            overrun[log.instance_id] = (sums.num_overrun - first.num_overrun) / num_steps
    if not steps:
        raise UserError("the server recorded no steps")
    return PacedRun(dilation, records, steps, overrun, told)


def figures_of(run: PacedRun, simulated: dict[str, Any]) -> Samples:
    """Return the figures of a run; times are modelled seconds: wall seconds over the dilation."""
    ttft_s = [(r.ttft_s or 0.0) / run.dilation for r in run.records]
    found = (tpot_s(r) for r in run.records)
    tpots_s = [each_s / run.dilation for each_s in found if each_s is not None]
    errors = {name: [s.took_s / s.modelled_s - 1 for s in run.steps[name]] for name in run.steps}
    errors = {name: found for name, found in errors.items() if found}
    modelled_s = [s.modelled_s for steps in run.steps.values() for s in steps]
    worked_s = [s.worked_s for steps in run.steps.values() for s in steps]
    late_s = sum(max(0.0, s.took_s - s.modelled_s) for steps in run.steps.values() for s in steps)
    figures: Samples = {
        "step_error_median": ([median(found) for found in errors.values()], "fraction"),
        "step_error_p99": ([percentile(found, 99) for found in errors.values()], "fraction"),
        "overrun_fraction": ([run.overrun_fractions[name] for name in errors], "fraction"),
        "late_fraction": ([late_s / sum(modelled_s)], "fraction"),
        "work_fraction": ([sum(worked_s) / sum(modelled_s)], "fraction"),
        "num_steps": ([float(len(modelled_s))], "steps"),
        "ttft": (ttft_s, "modelled s"),
        "tpot": (tpots_s, "modelled s"),
        "ttft_vs_simulated": ([median(ttft_s) / simulated["ttft_p50_s"]], "ratio"),
        "tpot_vs_simulated": ([median(tpots_s) / simulated["tpot_p50_s"]], "ratio"),
    }
    return {f"x{run.dilation:g}.{name}": found for name, found in figures.items()}
