"""Three regions of real balancers and modelled engines, under several policies.

    python -m benchmarks regions [--runs 3] [--json FILE]

One balancer for each region, two replicas each, distances of AWS between them
(``benchmarks/router/regions.py``), and most of the clients in one region. Balancers, connections
and distances are real; engines are the simulator's in real time, two to three times as fast as an
L4. Policies take turns, so that other work of the machine affects all of them. Latencies are those
of the clients, to the last byte, counted from the first attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from banaserve.base.arguments import positive
from banaserve_bench.statistics import percentile
from benchmarks.measurement import Measurement, parser_of
from benchmarks.router import engine
from benchmarks.router.clients import ClientLoad
from benchmarks.router.faults import account, kill_and_bring_back
from benchmarks.router.regions import REGIONS, RegionPlan, World

POLICIES = ("skywalker", "gorgo_v1", "load_aware", "round_robin")
OPTIONS: dict[str, dict[str, Any]] = {"gorgo_v1": {"max_outstanding": engine.SPEC.max_running}}
"""Options by policy: GORGO forwards nothing while a replica has room, here in its batch."""

CLIENTS = {"us": 60, "eu": 6, "asia": 6}
WARM_UP = 60
_NOTES = [" ".join(part.split()) for part in str(__doc__).split("\n\n")[2:]]


async def measure(policy: str, answers: int, seed: int) -> dict[str, float]:
    """Return the figures of one run."""
    async with _world(policy) as world:
        load = ClientLoad(world, CLIENTS, seed)
        try:
            await load.more(WARM_UP)
            begun = len(load.told)
            await load.more(answers)
            await load.end()
        finally:
            load.cancel()
        found, served = account(world, load), world.served()
    told = load.told[begun:]
    home = {one.name for one in told if one.region == "us"}
    e2e_s = [one.done_s - one.sent_s for one in told]
    ttft_s = [one.first_s - one.sent_s for one in told]
    taken_s = max(one.done_s for one in told) - min(one.sent_s for one in told)
    return {
        "e2e_p50_ms": percentile(e2e_s, 50) * 1e3,
        "e2e_p99_ms": percentile(e2e_s, 99) * 1e3,
        "ttft_p50_ms": percentile(ttft_s, 50) * 1e3,
        "ttft_p99_ms": percentile(ttft_s, 99) * 1e3,
        "requests_per_s": len(told) / taken_s,
        "forwarded_fraction": 1 - len(home & set(served["us"])) / max(1, len(home)),
        "lost_doubled_strayed_requests": found.num_lost + found.num_doubled + found.num_strayed,
    }


async def outlive(policy: str, seed: int) -> dict[str, float]:
    """Return the account of one run in which parts of the regions die and come back."""
    async with _world(policy) as world:
        load = ClientLoad(world, dict.fromkeys(REGIONS, 6), seed, output_tokens=16)
        try:
            await kill_and_bring_back(world, load)
            await load.end()
        finally:
            load.cancel()
        found = account(world, load)
    kinds = ("requests", "lost", "doubled", "bound", "strayed", "crossed", "broken")
    return {f"faults_num_{kind}": getattr(found, f"num_{kind}") for kind in kinds}


@contextlib.asynccontextmanager
async def _world(policy: str) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="regions-") as folder:
        async with World(
            RegionPlan(policy, options=OPTIONS.get(policy, {})), Path(folder)
        ) as world:
            yield world


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, writing the result after each run; return the exit code."""
    parser = parser_of("regions", __doc__)
    parser.add_argument("--runs", type=positive, default=3)
    parser.add_argument("--answers", type=int, default=600)
    given = parser.parse_args(list(argv))
    measurement, samples = Measurement("regions", given), defaultdict[str, list[float]](list)
    for run in range(given.runs):
        for policy in POLICIES:
            for name, value in asyncio.run(measure(policy, given.answers, run)).items():
                samples[f"{policy} {name}"].append(value)
        policy = POLICIES[run % len(POLICIES)]
        for name, value in asyncio.run(outlive(policy, run)).items():
            samples[f"{policy} {name}"].append(value)
        figures = {name: (each, _unit(name)) for name, each in samples.items()}
        # After each run, so that a run that ends early leaves the runs before.
        measurement.deliver(measurement.result(figures, _NOTES))
    return 0


def _unit(name: str) -> str:
    if name.endswith("per_s"):
        return "requests/s"
    return name.rpartition("_")[2] if name.endswith(("_ms", "_fraction")) else "requests"
