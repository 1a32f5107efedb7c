"""Cases of the simulator on paced engines, checked against their goals.

``python -m benchmarks cases``. Every system of a case gets the same requests, once in the simulator
and once as real engines whose time is modelled; a sample of answers is compared with those of one
otherwise idle vLLM engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec

from banaserve.base.arguments import Parser
from banaserve.base.config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.base.names import check_known
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.pacing import miniatures
from banaserve.sim import case as cases
from banaserve.sim.case import Case
from banaserve.sim.report.result import LatencyLimits, percentile
from banaserve.sim.request import SimRequest
from banaserve.sim.run import judged, simulate
from banaserve.sim.system import System
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import closed_loop, open_loop
from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.loadgen.servers import banaserve_server, end_on_sigterm, vllm_server
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime, commit
from banaserve_bench.serving.summary import output_tokens, tpot_s
from banaserve_bench.serving.timeline import decisions_of

DEFAULT_CASES = ("prefill-flood", "decode-flood", "oscillating-load")
PUBLISHED = "published"
"""Name of a system beside those of the case: banaserve with the preset of that name."""
_TIMEOUT_S = 3600.0
_OPTIONS = (
    *("--kv-store-size", "512MiB", "--max-concurrent-requests", "8192"),
    *("--request-timeout", f"{_TIMEOUT_S:g}"),
)
_WARM_UP = 4
_TOKEN_IDS = range(500, 40_000)
_NAME = "one-engine"
_PLAIN_OPTIONS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(256 << 20),
)
_UNITS = {
    "goodput_fraction": "fraction",
    "ttft_p50_s": "modelled s",
    "ttft_p99_s": "modelled s",
    "tpot_p50_s": "modelled s",
    "tpot_p99_s": "modelled s",
    "e2e_p99_s": "modelled s",
    "total_s": "modelled s",
    "num_moves": "steps",
    "equal_fraction": "fraction",
    "overrun_fraction": "fraction",
}
_NOTES = (
    "paced: real engines, store, router, migrations and control loop; steps, transfers and "
    "the control loop's seconds are modelled ones",
    "simulated: the same requests through the simulator; its static systems pull KV, real "
    "ones hand it over through the store",
    "goodput_fraction: requests within the case's limits of TTFT and TPOT",
    "equal_fraction: of a sample, answers that are those of one engine of vLLM's own",
    "commit and start of each run stand beside it in raw",
)
_Found = dict[str, dict[str, Any]]
Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and tokens of its greedy answer."""


def main(argv: Sequence[str]) -> int:
    """Run the cases and write the result; return 1 if a goal is missed or an answer differs."""
    given = _parse(argv)
    end_on_sigterm()
    began = datetime.now(UTC)
    found = _kept(given.json)
    for name in given.case:
        for system in _systems(given, _cut(given, name)):
            found[name] = _with_system(given, _cut(given, name), system, found.get(name))
            record = _result(given, began, found)
            if given.json is not None:
                result.write(record, given.json)  # the next one takes minutes
    result.deliver(record, given.json)
    return 0 if all(_is_good(found[name]) for name in given.case) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks cases", description=__doc__)
    add = parser.add_argument
    add("case", nargs="*", help=f"names, or .toml files ({', '.join(DEFAULT_CASES)})")
    add("--json", type=Path, help="write the result there; what it holds of others is kept")
    add("--system", action="append", help=f"of the case, or {PUBLISHED}; several times; else all")
    add("--dilate", type=float, default=4.0, metavar="N", help="wall seconds of a modelled one")
    add("--phase-s", type=float, metavar="S", help="cut each phase to so many modelled seconds")
    add("--repeat", type=int, metavar="N", help="repeat the phases so often")
    add("--seed", type=int, help="of the requests; the case's own")
    add("--sample", type=int, default=12, help="answers to compare with one engine's")
    given = parser.parse_args(list(argv))
    given.case = given.case or list(DEFAULT_CASES)
    for name, least in (("dilate", 0.1), ("sample", 1), ("repeat", 1), ("phase_s", 1.0)):
        value = getattr(given, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value:g}: give {least:g} or more")
    for name in given.case:
        _systems(given, _cut(given, name))  # a wrong name stops before anything runs
    return given


def _kept(path: Path | None) -> dict[str, Any]:
    """Return the contents of an earlier result, by case; empty if there is none."""
    if path is None or not path.exists():
        return {}
    kept = result.read(path)
    if kept.name != "cases":
        raise UserError(f"{path} is a result of bench {kept.name}: give another file")
    return dict(kept.raw["cases"])


def _cut(given: argparse.Namespace, name: str) -> Case:
    case = cases.read(name)
    if case.events:
        raise UserError(f"case {name} has events, which only the simulator can make happen")
    phases = case.phases
    if given.phase_s is not None:
        phases = tuple(replace(p, duration_s=min(p.duration_s, given.phase_s)) for p in phases)
    seed = case.seed if given.seed is None else given.seed
    return replace(case, phases=phases, repeat=given.repeat or case.repeat, seed=seed)


def _systems(given: argparse.Namespace, case: Case) -> dict[str, Any]:
    systems = dict(case.systems)
    if "banaserve" in systems:
        moved = systems["banaserve"]
        systems[PUBLISHED] = replace(moved, migration="published", migration_options={})
    for name in given.system or ():
        check_known(f"system of case {case.name}", name, systems)
    wanted = given.system or case.systems
    return {name: systems[name] for name in wanted}


def _with_system(
    given: argparse.Namespace, case: Case, system_name: str, before: dict[str, Any] | None
) -> dict[str, Any]:
    """Run one system; return its case with what is known of other systems under the same load."""
    system = _systems(given, case)[system_name]
    load = {
        "phase_s": [phase.duration_s for phase in case.phases],
        "repeat": case.repeat,
        "seed": case.seed,
        "dilation": given.dilate,
    }
    is_same = before is not None and before["load"] == load
    paced: _Found = dict(before["paced"]) if before is not None and is_same else {}
    simulated: _Found = dict(before["simulated"]) if before is not None and is_same else {}
    simulated[system_name] = simulate(case.profile, system, case.requests(case.seed), case.limits)
    asked = [CaseRequest.of(request, case.seed) for request in case.requests(case.seed)]
    began = datetime.now(UTC)
    ran = asyncio.run(run_system(case.profile, system, asked, given.dilate, case.limits))
    paced[system_name] = _told(given, case, asked, ran, began)
    return {
        "load": load,
        "paced": paced,
        "simulated": simulated,
        "goals": {
            "paced": judged(case, case.seed, paced)["goals"],
            "simulated": judged(case, case.seed, simulated)["goals"],
        },
    }


def _told(
    given: argparse.Namespace,
    case: Case,
    asked: Sequence[CaseRequest],
    ran: CaseRun,
    began: datetime,
) -> dict[str, Any]:
    places = sampled(len(asked), given.sample)
    answers = [(asked[n].prompt, ran.records[n].token_ids) for n in places]
    equal = num_equal(case.profile, answers)
    commit_id, dirty = commit()
    return {
        **ran.figures,
        "equal_fraction": equal / len(places),
        "num_compared": len(places),
        "decisions": ran.decisions,
        "modelled_time": msgspec.to_builtins(ran.modelled_time),
        "commit": commit_id,
        "dirty": dirty,
        "started_at": began.isoformat(timespec="seconds"),
    }


def _is_good(found: Mapping[str, Any]) -> bool:
    goals = all(goal["is_reached"] for goal in found["goals"]["paced"])
    return goals and all(one["equal_fraction"] == 1.0 for one in found["paced"].values())


def _result(
    given: argparse.Namespace, began: datetime, found: Mapping[str, dict[str, Any]]
) -> result.Result:
    figures = {}
    modelled = []
    for case, one in found.items():
        for system, told in one["paced"].items():
            modelled.append(msgspec.convert(told["modelled_time"], ModelledTime))
            for metric, unit in _UNITS.items():
                figures[f"{case}.{system}.{metric}"] = result.figure([told[metric]], unit)
            simulated = one["simulated"][system]["goodput_fraction"]
            name = f"{case}.{system}.goodput_fraction_simulated"
            figures[name] = result.figure([simulated], "fraction")
    return result.result(
        "cases",
        seed=0 if given.seed is None else given.seed,
        options={name: value for name, value in vars(given).items() if name != "json"},
        started_at=began,
        figures=figures,
        notes=_NOTES,
        raw={"cases": dict(found)},
        modelled_time=modelled,
    )


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """A request: its arrival in modelled seconds, its prompt and its output length."""

    at_s: float
    prompt: list[int]
    output_tokens: int

    @classmethod
    def of(cls, request: SimRequest, seed: int) -> Self:
        """Return the request with a prompt that it shares with no other."""
        draws = random.Random(f"{seed} prompt {request.id}")
        prompt = draws.choices(_TOKEN_IDS, k=request.prompt_tokens)
        return cls(request.arrival_s, prompt, request.output_tokens)


@dataclass(frozen=True, slots=True)
class CaseRun:
    """Outcome of one system.

    Attributes:
        figures: Figures by their names in the simulator's results, times in modelled seconds.
        decisions: Decisions that began steps.
    """

    records: list[RequestRecord]
    figures: dict[str, float]
    decisions: list[dict[str, Any]]
    modelled_time: ModelledTime


async def run_system(
    profile: Profile,
    system: System,
    asked: Sequence[CaseRequest],
    dilation: float,
    limits: LatencyLimits,
) -> CaseRun:
    """Start ``system``, send it ``asked`` at their times, and end it.

    Raises:
        UserError: The system does not start, or its time is not modelled.
    """
    with TemporaryDirectory(prefix="bench-") as folder:
        log = Path(folder) / "decisions.jsonl"
        options = options_of(system, profile.name, dilation, log)
        with banaserve_server(MINIATURE, *options, "--run-dir", f"{folder}/run") as server:
            name = f"paced-{profile.name}"
            async with OpenAiClient(
                server.url, name, return_token_ids=True, timeout_s=_TIMEOUT_S, read_late=True
            ) as client:
                warm_up = [CaseRequest(0.0, one.prompt[:64], 8) for one in asked[:_WARM_UP]]
                await send(client, warm_up, dilation)
                began_s = time.time()
                records = await send(client, asked, dilation)
            told = modelled_time(server.url)
        if told is None:
            raise UserError(f"{server.url} does not say that its time is modelled")
        decisions = decisions_of(log, began_s, dilation)
    num_moves = sum(step["ending"] == "done" for one in decisions for step in one["steps"])
    figures = figures_of(records, dilation, limits)
    figures["num_moves"] = float(num_moves)
    figures["overrun_fraction"] = told.num_overrun / max(1, told.num_steps)
    return CaseRun(records, figures, decisions, told)


def options_of(system: System, profile: str, dilation: float, log: Path) -> list[str]:
    """Return ``banaserve serve``'s options for ``system``.

    Raises:
        UserError: The system has colocated instances, which the cases on engines leave out.
    """
    if system.colocated:
        raise UserError("only systems with prefill and decode apart run as paced engines")
    options = ["--pace", profile, "--dilate", f"{dilation:g}"]
    options += ["--pd", f"{system.prefill}:{system.decode}", "--routing-policy", system.routing]
    for key, value in system.routing_options.items():
        options += ["--routing-option", f"{key}={value}"]
    if system.migration == "still":
        return [*options, *_OPTIONS, "--orchestrator", "off"]
    limits = system.control_limits
    options += ["--orchestrator", "on", "--orchestrator-policy", system.migration]
    options += ["--orchestrator-interval", f"{system.control_s:g}"]
    options += ["--orchestrator-concurrent", str(limits.concurrent)]
    options += ["--orchestrator-per-minute", str(limits.per_minute), "--decision-log", str(log)]
    if system.overlap_fraction == 0:
        options += ["--migration-overlap", "1"]  # As the case has it: guests are waited for.
    for key, value in system.migration_options.items():
        options += ["--orchestrator-option", f"{key}={value}"]
    return [*options, *_OPTIONS]


async def send(
    client: OpenAiClient, asked: Sequence[CaseRequest], dilation: float
) -> list[RequestRecord]:
    """Send each of ``asked`` when it is due; return the records when all have ended."""
    calls = [
        CompletionCall(
            str(n), prompt=one.prompt, max_tokens=one.output_tokens, extra={"ignore_eos": True}
        )
        for n, one in enumerate(asked)
    ]
    return await open_loop(client, calls, [one.at_s * dilation for one in asked])


def figures_of(
    records: Sequence[RequestRecord], dilation: float, limits: LatencyLimits
) -> dict[str, float]:
    """Return figures of real records, named as the simulator's; latencies count from arrival."""
    ended = [r for r in records if r.error is None and r.ended_at_s is not None]
    start_s = min(_due_s(record) for record in records)
    ttft = [((r.first_token_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
    tpot = [(tpot_s(r) or 0.0) / dilation for r in ended]
    e2e = [((r.ended_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
    good = sum(
        first <= limits.ttft_s and each <= limits.tpot_s
        for first, each in zip(ttft, tpot, strict=True)
    )
    total_s = max(((r.ended_at_s or 0.0) - start_s for r in ended), default=0.0) / dilation
    figures = {
        "num_requests": float(len(records)),
        "num_finished": float(len(ended)),
        "finished_fraction": len(ended) / len(records),
        "goodput_fraction": good / len(records),
        "total_s": total_s,
        "output_tokens_per_s": sum(map(output_tokens, ended)) / total_s if total_s else 0.0,
    }
    for name, values in (("ttft", sorted(ttft)), ("tpot", sorted(tpot)), ("e2e", sorted(e2e))):
        figures[f"{name}_mean_s"] = sum(values) / len(values) if values else 0.0
        figures[f"{name}_p50_s"] = percentile(values, 0.5)
        figures[f"{name}_p99_s"] = percentile(values, 0.99)
    return figures


def _due_s(record: RequestRecord) -> float:
    return record.sent_at_s if record.due_at_s is None else record.due_at_s


def sampled(total: int, count: int) -> list[int]:
    """Return the indices of ``count`` of ``total`` requests, spread evenly."""
    count = min(count, total)
    return [place * total // count for place in range(count)]


def num_equal(profile: Profile, answers: Sequence[Answer]) -> int:
    """Return how many ``answers`` one vLLM engine with the profile's miniature gives too."""
    model = miniatures.resolve(profile, print)
    calls = [
        CompletionCall(str(n), prompt=prompt, max_tokens=len(answer), extra={"ignore_eos": True})
        for n, (prompt, answer) in enumerate(answers)
    ]
    # The model's maximum context may not fit into the cache, which is sized for these few answers.
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    options = (*_PLAIN_OPTIONS, "--max-model-len", str(longest + 1))
    with vllm_server(model.path_or_id, _NAME, *options) as server:
        expected = asyncio.run(_ask(server.url, calls))
    return sum(one == answer for one, (_, answer) in zip(expected, answers, strict=True))


async def _ask(url: str, calls: Sequence[CompletionCall]) -> list[list[int]]:
    async with OpenAiClient(url, _NAME, return_token_ids=True) as client:
        return [record.token_ids for record in await closed_loop(client, calls, 4)]
