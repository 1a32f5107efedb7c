"""A burst on one decode instance before two more serve, with and without rebalancing.

``python -m benchmarks rebalancing``. One prefill and three decode instances, all paced. All
requests come at once while two of the decode instances are drained, so that all of them decode on
the third; then the two serve again, and get only new requests unless streams move. Both servers get
the same requests. Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from banaserve.base.arguments import positive
from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.contracts.trace_events import LegFailed
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve_bench.loadgen.client import OpenAiClient
from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.loadgen.servers import Server
from banaserve_bench.results.result import ModelledTime, Result
from banaserve_bench.results.statistics import paired_ratios
from banaserve_bench.serving.simulated_requests import CaseRequest, figures_of, send
from benchmarks.measurement import Measurement, Samples, administered_server, parser_of
from benchmarks.paced_requests import num_equal, sampled

_DECODE, _OTHERS = ("d0", "d1", "d2"), ("d1", "d2")
_BALANCED_AFTER_S = 5.0
"""Modelled seconds from the release of the two instances until their loads are compared."""
_TIMEOUT_S = 3600.0
_WAYS = {"kept": "--no-rebalance", "rebalanced": "--rebalance"}
_NOTES = (
    "paced: real engines and store, the time of their steps is modelled",
    "largest_over_mean: of the requests in flight on the three decode instances, five modelled "
    "seconds after two of them serve again",
    "equal_fraction: of a sample, answers that are those of one plain vLLM engine",
    "least_gap_s: least time between two moves of one stream; null if none moved twice",
)


class BurstRun(NamedTuple):
    """Outcome of the burst on one server; times in modelled seconds.

    Attributes:
        largest_over_mean: Ratio of the largest to the mean number of requests on the three decode
            instances, five seconds after two of them serve again.
        num_moved: Number of streams that the rebalancer moved.
        least_gap_s: Shortest time between two moves of one stream; infinite if none moved twice.
        equal_fraction: Share of a sample whose answers equal those of one plain vLLM engine.
    """

    figures: dict[str, float]
    largest_over_mean: float
    num_moved: float
    least_gap_s: float
    equal_fraction: float
    time: ModelledTime


def main(argv: Sequence[str]) -> int:
    parser = parser_of("rebalancing", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=3, help="of each server")
    add("--requests", type=positive, default=360)
    add("--prompt-tokens", type=positive, default=100)
    add("--output-tokens", type=positive, default=400)
    add("--profile", default="opt-13b-a100")
    add("--dilate", type=float, default=2.5, help="wall seconds of a modelled one")
    add("--sample", type=positive, default=8, help="answers a run that are compared")
    given = parser.parse_args(list(argv))
    measurement = Measurement("rebalancing", given)
    runs: dict[str, list[BurstRun]] = {name: [] for name in _WAYS}
    for number in range(given.runs):
        for name in sorted(_WAYS, reverse=bool(number % 2)):
            run = asyncio.run(_run(given, _WAYS[name], number))
            runs[name].append(run)
            print(
                f"{number + 1} of {given.runs}, {name}: largest over mean "
                f"{run.largest_over_mean:.2f}, tpot p99 {run.figures['tpot_p99_s']:.3f} s, "
                f"{run.num_moved:.0f} moved, {run.time.overrun_fraction:.1%} of the steps late",
                flush=True,
            )
    measurement.deliver(_result(measurement, runs))
    return 0


async def _run(given: argparse.Namespace, way: str, number: int) -> BurstRun:
    profile = load(given.profile)
    asked = [
        CaseRequest.of(SimRequest(n, 0.0, given.prompt_tokens, given.output_tokens), number)
        for n in range(given.requests)
    ]
    options = ["--pace", profile.name, "--dilate", f"{given.dilate:g}", "--pd", "1:3", way]
    options += ["--kv-store-size", "1GiB", "--max-concurrent-requests", "8192"]
    options += ["--orchestrator", "off", "--request-timeout", f"{_TIMEOUT_S:g}"]
    with administered_server(MINIATURE, *options) as (server, admin, _):
        name = f"paced-{profile.name}"
        async with OpenAiClient(
            server.url, name, return_token_ids=True, timeout_s=_TIMEOUT_S, read_late=True
        ) as client:
            for other in _OTHERS:
                admin.drain(other)
            sending = asyncio.create_task(send(client, asked, given.dilate))
            largest = await asyncio.to_thread(_release, server, admin, given)
            records = await sending
        moved = server.metric("banaserve_streams_rebalanced_total")
        gap_s = _least_gap_s(admin, given.requests) / given.dilate
        told = modelled_time(server.url)
    assert told is not None, "a paced server says how it kept time"
    answers = [(asked[n].prompt, records[n].token_ids) for n in sampled(len(asked), given.sample)]
    if failed := [record.error for record in records if record.error]:
        raise UserError(f"{len(failed)} requests failed, the first by: {failed[0]}")
    return BurstRun(
        figures_of(records, given.dilate, LatencyLimits()),
        largest,
        moved,
        gap_s,
        await asyncio.to_thread(num_equal, profile, answers) / len(answers),
        told,
    )


def _release(server: Server, admin: AdminClient, given: argparse.Namespace) -> float:
    """Release the two instances once the burst decodes; return the imbalance 5 s later."""
    while sum(_running(server)) < given.requests:
        time.sleep(0.2)
    for other in _OTHERS:
        admin.release(other)
    time.sleep(_BALANCED_AFTER_S * given.dilate)
    running = _running(server)
    return max(running) / (sum(running) / len(running))


def _running(server: Server) -> list[float]:
    return [server.metric("banaserve_requests_in_flight", instance_id=name) for name in _DECODE]


def _least_gap_s(admin: AdminClient, num_requests: int) -> float:
    gaps = [float("inf")]
    for summary in admin.requests(num_requests):
        at_s = [
            line.at_s
            for line in admin.trace(summary.id).lines
            if isinstance(line.event, LegFailed) and line.event.why == "rebalanced"
        ]
        gaps += [after - before for before, after in pairwise(at_s)]
    return min(gaps)


def _result(measurement: Measurement, runs: dict[str, list[BurstRun]]) -> Result:
    kept, moved = runs["kept"], runs["rebalanced"]
    samples: Samples = {}
    for figure in ("tpot_p99_s", "tpot_p50_s", "ttft_p99_s", "total_s"):
        pairs = ([run.figures[figure] for run in found] for found in (moved, kept))
        samples[f"{figure.removesuffix('_s')}_ratio"] = paired_ratios(*pairs), "ratio"
        for name, found in runs.items():
            samples[f"{name}.{figure}"] = [run.figures[figure] for run in found], "modelled s"
    for name, found in runs.items():
        samples[f"{name}.largest_over_mean"] = [run.largest_over_mean for run in found], "ratio"
        samples[f"{name}.num_moved"] = [run.num_moved for run in found], "streams"
        samples[f"{name}.equal_fraction"] = [run.equal_fraction for run in found], "fraction"
        samples[f"{name}.late_fraction"] = [run.time.overrun_fraction for run in found], "fraction"
    twice = [run.least_gap_s for run in moved if run.least_gap_s != float("inf")]
    return measurement.result(
        samples,
        _NOTES,
        raw={"least_gap_s": min(twice) if twice else None},
        modelled_time=[run.time for found in runs.values() for run in found],
    )
