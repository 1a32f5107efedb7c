"""Real engines in modelled time: is the elastic system ever slower than plain colocated ones?

``python -m benchmarks elastic-paced [CELL ...] [--json FILE]``. Each cell runs four colocated
engines without a store behind least requests, and ``--instances 4`` with the elastic policy, on the
same requests; the result also has the simulator's figures for these requests. A cell that the file
already holds is kept. A sample of the elastic answers is compared with those of one vLLM engine.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec

from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve_bench.datasets.files import data_folder
from banaserve_bench.loadgen.client import OpenAiClient, RequestRecord
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.servers import banaserve_server
from banaserve_bench.results.result import ModelledTime, Result, commit
from banaserve_bench.results.statistics import median
from banaserve_bench.serving.simulated_requests import send
from banaserve_bench.serving.timeline import decisions_of
from banaserve_bench.simulation.run import tallied
from benchmarks.elastic.paced_cells import CELLS, WARM_UP_S, PacedCell, requests_of
from benchmarks.elastic.runs import elastic_system
from benchmarks.measurement import Measurement, Samples, earlier, parser_of
from benchmarks.paced_requests import num_equal, sampled
from benchmarks.pacing import PacedRequest

COLOCATED, ELASTIC = "colocated", "elastic"
_SYSTEMS = (COLOCATED, ELASTIC)
_SHARED = ("--max-concurrent-requests", "8192", "--request-timeout", "3600")
_WARM_PROMPTS, _WARM_TOKENS = 8, 8
_UNITS = {
    "goodput": "fraction",
    "tokens_per_s": "tokens/modelled s",
    "ttft_p50_s": "modelled s",
    "ttft_mean_s": "modelled s",
    "tpot_mean_s": "modelled s",
    "total_s": "modelled s",
}


class Served(NamedTuple):
    """Client's times of one request, in modelled seconds from the first arrival."""

    at_s: float
    first_s: float
    end_s: float
    num_tokens: int


def main(argv: Sequence[str]) -> int:
    parser = parser_of("elastic-paced", __doc__)
    add = parser.add_argument
    add("cell", nargs="*", help=", ".join(one.name for one in CELLS))
    add("--duration", type=float, default=75.0, help="of the arrivals, modelled s")
    add("--instances", type=int, default=4)
    add("--sample", type=int, default=6, help="answers compared with one engine's")
    add("--data", type=Path)
    given = parser.parse_args(list(argv))
    if given.duration <= WARM_UP_S:
        raise UserError(f"--duration {given.duration:g}: more than the {WARM_UP_S:g} s of warm-up")
    known = {one.name: one for one in CELLS}
    for name in given.cell:
        check_known("cell", name, known)
    measurement = Measurement("elastic-paced", given)
    left = earlier(given.json, "elastic-paced", {})
    outcomes = left.raw["outcomes"] if left else {}
    found = {name: one for name, one in outcomes.items() if one["duration_s"] == given.duration}
    for name in given.cell or known:
        if name not in found:
            found[name] = _run_cell(given, known[name])
            measurement.keep(_result(measurement, found))
    measurement.deliver(_result(measurement, found))
    return 0


def _run_cell(given: argparse.Namespace, one: PacedCell) -> dict[str, Any]:
    asked = requests_of(one, given.instances, given.duration, data_folder(given.data))
    cell: dict[str, Any] = {
        "duration_s": given.duration,
        "num_requests": len(asked),
        "load": one.cell.name,
        "dilation": one.dilation,
    }
    for system in _SYSTEMS:
        print(f"{one.name}: {system}, {len(asked)} requests, {given.duration:g} modelled s")
        cell[system] = _run_system(given, one, system, asked)
        print(_words(cell[system]), flush=True)
    return cell


def _run_system(
    given: argparse.Namespace, one: PacedCell, system: str, asked: Sequence[PacedRequest]
) -> dict[str, Any]:
    began = datetime.now(UTC)
    records, told, decisions = asyncio.run(_serve(one, options_of(one, system, given), asked))
    # Plain engines are the reference, so their answers are not compared.
    places = sampled(len(asked), given.sample) if system == ELASTIC else []
    answers = [(asked[n].prompt, records[n].token_ids) for n in places]
    commit_id, dirty = commit()
    simulated = simulate_cell(one, system, given.instances, asked)
    return {
        "paced": figures_of(served_of(records), one, given.duration),
        "simulated": figures_of(simulated, one, given.duration),
        "num_failed": sum(record.error is not None for record in records),
        "num_equal": num_equal(profiles.load(one.cell.profile), answers) if answers else 0,
        "num_compared": len(places),
        "decisions": decisions,
        "modelled_time": msgspec.to_builtins(told),
        "commit": commit_id,
        "dirty": dirty,
        "started_at": began.isoformat(timespec="seconds"),
    }


def options_of(one: PacedCell, system: str, given: argparse.Namespace) -> list[str]:
    """Return ``banaserve serve``'s options for a system of a cell."""
    options = ["--pace", one.cell.profile, "--dilate", f"{one.dilation:g}", *_SHARED]
    if system == COLOCATED:
        options += ["--colocated", str(given.instances), "--no-kv-store", "--migration", "off"]
        return [*options, "--orchestrator", "off", "--routing-policy", "least_requests"]
    ttft_s, tpot_s = one.limits_s
    options += ["--instances", str(given.instances), "--kv-store-size", "512MiB"]
    return [*options, "--slo-ttft", f"{ttft_s:g}", "--slo-tpot", f"{tpot_s:g}"]


_Ran = tuple[list[RequestRecord], ModelledTime, list[dict[str, Any]]]
"""Records, accuracy of the modelled time, and decisions."""


async def _serve(one: PacedCell, options: Sequence[str], asked: Sequence[PacedRequest]) -> _Ran:
    with TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "decisions.jsonl"
        logged = ("--decision-log", str(log)) if "--instances" in options else ()
        files = ("--run-dir", f"{folder}/run")
        with banaserve_server(MINIATURE, *options, *logged, *files) as server:
            clock = StretchedClock(one.dilation)
            async with OpenAiClient(
                server.url,
                f"paced-{one.cell.profile}",
                return_token_ids=True,
                timeout_s=3600.0,
                read_late=True,
                clock=clock,
            ) as client:
                warm_up = [
                    PacedRequest(0.0, ask.prompt[:_WARM_TOKENS], _WARM_TOKENS)
                    for ask in asked[:_WARM_PROMPTS]
                ]
                await send(client, warm_up, 1.0)
                began_s = time.time()
                records = await send(client, asked, 1.0)
            told = modelled_time(server.url)
        if told is None:
            raise UserError(f"{server.url} does not say that its time is modelled")
        decisions = decisions_of(log, began_s, one.dilation) if logged else []
    return records, told, decisions


def served_of(records: Sequence[RequestRecord]) -> list[Served]:
    """Return the requests that ended; latencies count from the arrival, not from the sending."""
    start_s = min(record.due_at_s or 0.0 for record in records)
    return [
        Served(
            (record.due_at_s or 0.0) - start_s,
            (record.first_token_at_s or 0.0) - start_s,
            (record.ended_at_s or 0.0) - start_s,
            len(record.token_ids),
        )
        for record in records
        if record.error is None
    ]


def simulate_cell(
    one: PacedCell, system: str, size: int, asked: Sequence[PacedRequest]
) -> list[Served]:
    """Return the same requests as the simulator serves them."""
    known = {
        COLOCATED: System(kind="colocated", colocated=size, routing="least_requests"),
        ELASTIC: elastic_system(one.cell, size),
    }
    clusters: list[SimCluster] = []
    requests = [
        SimRequest(n, ask.at_s, len(ask.prompt), ask.output_tokens, max_tokens=ask.output_tokens)
        for n, ask in enumerate(asked)
    ]
    tallied(profiles.load(one.cell.profile), known[system], requests, watch=clusters.append)
    start_s = asked[0].at_s
    return [
        Served(
            request.arrival_s - start_s,
            request.first_s - start_s,
            request.end_s - start_s,
            request.output_tokens,
        )
        for request in clusters[0].finished
    ]


def figures_of(served: Sequence[Served], one: PacedCell, duration_s: float) -> dict[str, float]:
    """Return figures of requests that arrived after the warm-up; time runs to their last token."""
    ttft_limit_s, tpot_limit_s = one.limits_s
    counted = [each for each in served if each.at_s >= WARM_UP_S]
    ttft = [each.first_s - each.at_s for each in counted]
    tpot = [(each.end_s - each.first_s) / max(1, each.num_tokens - 1) for each in counted]
    good = sum(
        first <= ttft_limit_s and token <= tpot_limit_s
        for first, token in zip(ttft, tpot, strict=True)
    )
    total_s = max(each.end_s for each in counted) - WARM_UP_S
    return {
        "num_requests": float(len(counted)),
        "goodput": good / len(counted),
        "tokens_per_s": sum(each.num_tokens for each in counted) / total_s,
        "ttft_p50_s": median(ttft),
        "ttft_mean_s": sum(ttft) / len(ttft),
        "tpot_mean_s": sum(tpot) / len(tpot),
        "total_s": total_s,
    }


def _ratios(cell: dict[str, Any], kind: str) -> dict[str, float]:
    own, plain = cell[ELASTIC][kind], cell[COLOCATED][kind]
    return {
        "goodput_ratio": own["goodput"] / max(plain["goodput"], 0.01),
        "tokens_per_s_ratio": own["tokens_per_s"] / plain["tokens_per_s"],
    }


def _result(measurement: Measurement, found: dict[str, dict[str, Any]]) -> Result:
    figures: Samples = {}
    modelled = []
    for name, cell in found.items():
        for system in _SYSTEMS:
            told = cell[system]
            modelled.append(msgspec.convert(told["modelled_time"], ModelledTime))
            for kind in ("paced", "simulated"):
                for metric, unit in _UNITS.items():
                    figures[f"{name}.{system}.{kind}.{metric}"] = [told[kind][metric]], unit
            ratio = told["simulated"]["ttft_mean_s"] / told["paced"]["ttft_mean_s"]
            figures[f"{name}.{system}.simulated_ttft_ratio"] = [ratio], "ratio"
        for kind in ("paced", "simulated"):
            for metric, value in _ratios(cell, kind).items():
                figures[f"{name}.{kind}.{metric}"] = [value], "ratio"
    for metric in ("goodput_ratio", "tokens_per_s_ratio"):
        least = [_ratios(cell, "paced")[metric] for cell in found.values()]
        figures[f"{metric}_min"] = [min(least)], "ratio"
    raw = {"outcomes": found}
    return measurement.result(figures, [str(__doc__)], raw=raw, modelled_time=modelled)


def _words(told: dict[str, Any]) -> str:
    time_kept = told["modelled_time"]
    overrun = time_kept["num_overrun"] / max(1, time_kept["num_steps"])
    shown = [
        f"{kind}: goodput {one['goodput']:.3f}, {one['tokens_per_s']:.0f} tokens/s, "
        f"TTFT {one['ttft_mean_s']:.3f} s, TPOT {1e3 * one['tpot_mean_s']:.1f} ms"
        for kind, one in (("paced", told["paced"]), ("simulated", told["simulated"]))
    ]
    return (
        f"  {'; '.join(shown)}; {overrun:.1%} of the steps late, {told['num_failed']} failed, "
        f"{told['num_equal']} of {told['num_compared']} answers equal"
    )
