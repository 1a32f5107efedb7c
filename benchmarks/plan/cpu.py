"""Predictions for real engines on this machine's CPU, from step times that a probe measures."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rich.console import Console

from banaserve.base import models
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import banaserve_server
from banaserve_bench.loadgen.target import ServerUnderTest, find_target
from banaserve_bench.plan.confirm.engines import at_server, small_words
from banaserve_bench.plan.probe.command import ProbeOptions, probe_command
from banaserve_bench.plan.probe.profile_file import profile_text
from banaserve_bench.plan.search.candidates import USUAL_STEP_TOKENS, Candidate, colocated
from banaserve_bench.plan.search.trial import Device
from banaserve_bench.results.statistics import median
from benchmarks.measurement import Measurement, Samples, model_of, random_tokens
from benchmarks.plan.cpu_arrangements import CpuArrangement, cpu_arrangements, foreseen_system
from benchmarks.plan.foreseen import THROUGHPUT, TPOT, TTFT, ForeseenSystem

_LIKE = "smollm2-135m-cpu"
"""Profile whose link between two engines of one machine is taken."""
_ENGINE = (
    *("--kv-cache-memory-bytes", str(512 << 20), "--max-model-len", "2048"),
    *("--max-num-seqs", "128", "--enforce-eager"),
)
_WARM_S = 5.0
"""Time in which uncounted requests arrive first: the first step of each shape takes longer."""
_COMPARED, _COMPARED_PROMPT, _COMPARED_OUTPUT = 8, 200, 30
"""Requests by which one engine is compared with two, and their tokens."""
_GOOD = 0.2
_FIGURES = {"TTFT": TTFT, "TPOT": TPOT, "throughput": THROUGHPUT}
_NOTES = (
    "real engines of SmolLM2-135M, one thread each, on this machine's CPU; all arrangements are "
    "predicted before the first of them runs",
    "step times are of banaserve plan probe on one colocated engine; neighbour_factor: latency of "
    "two engines that are both busy over that of one, measured with other requests; the simulated "
    "steps of two engines are longer by it, weighted with the time in which engines are busy",
    "errors: of the simulator's means for the same requests, one sample for each arrangement; "
    "within 20%: share of the arrangements",
)


class ForeseenLoad(NamedTuple):
    """Arrangement, the requests that it gets, and what is predicted of them."""

    arrangement: CpuArrangement
    rows: list[Arrival]
    system: ForeseenSystem


def measure_arrangements(given: argparse.Namespace) -> int:
    """Probe an engine, predict all arrangements, then run them; return the exit code."""
    measurement, console = Measurement("plan", given), Console(width=160)
    profile, factor = _probed(given.probe_s), _neighbour_factor()
    console.print(f"an engine beside a busy one takes {factor:.2f} times as long")
    loads = list(_foreseen(given, Device(profile), factor))
    done: dict[str, ForeseenSystem] = {}
    seeds = count()
    for candidate, group in groupby(loads, lambda one: one.arrangement.candidate):
        with _engines(candidate) as target:
            for one in group:
                served = _served(target, one, next(seeds))
                done[one.arrangement.name] = served
                console.print(f"{one.arrangement.name}: {served.words}")
    raw = {
        "profile": profile_text(profile, ()).splitlines(),
        "arrangements": {
            name: {"predicted": one.predicted, "outcome": one.outcome} for name, one in done.items()
        },
    }
    measurement.deliver(measurement.result(_samples([*done.values()], factor), _NOTES, raw=raw))
    return 0


@contextmanager
def _engines(candidate: Candidate) -> Iterator[ServerUnderTest]:
    with banaserve_server(models.PACKAGED, *small_words(candidate), *_ENGINE) as server:
        yield find_target(server.url, None, None)


def _probed(duration_s: float) -> Profile:
    """Return the profile that a probe of one engine gives."""
    shape = Path(model_of(models.PACKAGED).path_or_id)
    with TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "measured.toml"
        with _engines(colocated(1, store=False)) as target:
            probe_command(
                ProbeOptions(
                    url=target.url,
                    duration_s=duration_s,
                    save=path,
                    model=shape,
                    step_tokens=USUAL_STEP_TOKENS,
                    like=_LIKE,
                )
            )
        return profiles.load(str(path))


def _neighbour_factor() -> float:
    """Return the factor of an engine's times while another one is busy all the time."""
    with _engines(colocated(2, store=False)) as target:
        alone_s, beside_s = asyncio.run(_latencies_s(target))
    return max(1.0, beside_s / alone_s)


async def _latencies_s(target: ServerUnderTest) -> tuple[float, float]:
    """Return the median latency of requests one at a time, and two at a time on two engines."""
    draws = random.Random("neighbours")

    async def median_s(client: OpenAiClient, concurrency: int) -> float:
        prompts = (random_tokens(draws, _COMPARED_PROMPT) for _ in range(concurrency * _COMPARED))
        calls = CompletionCall.numbered(prompts, _COMPARED_OUTPUT)
        records = await closed_loop(client, calls, concurrency)
        return median([one.checked().latency_s or 0.0 for one in records])

    async with OpenAiClient(target.url, target.model, return_token_ids=True) as client:
        await median_s(client, 2)  # the first step of each shape takes longer
        return await median_s(client, 1), await median_s(client, 2)


def _foreseen(
    given: argparse.Namespace, device: Device, neighbour_factor: float
) -> Iterator[ForeseenLoad]:
    for one in [*cpu_arrangements()][: given.cells]:
        rows = one.rows(device, given.load_s, neighbour_factor)
        yield ForeseenLoad(one, rows, foreseen_system(device, one, rows, neighbour_factor))


def _served(target: ServerUnderTest, one: ForeseenLoad, seed: int) -> ForeseenSystem:
    limits = LatencyLimits()
    first = [row for row in one.rows if row.at_s <= _WARM_S]
    at_server(target, None, first, limits, -1 - seed)
    return one.system.served(at_server(target, None, one.rows, limits, seed))


def _samples(done: Sequence[ForeseenSystem], neighbour_factor: float) -> Samples:
    found: Samples = {"neighbour_factor": ([neighbour_factor], "ratio")}
    for name, figure in _FIGURES.items():
        errors = [abs(one.error(figure)) for one in done]
        share = sum(error <= _GOOD for error in errors) / len(errors)
        found[f"{name} error"] = (errors, "relative error without sign")
        found[f"{name} within {_GOOD:.0%}"] = ([share], "share")
    return found
