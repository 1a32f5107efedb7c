"""``banaserve bench compare``: which system serves the same requests better on this machine?

Starts one system after the other, sends each the same requests at the same times, checks a
sample of its answers token by token against a single vLLM engine, and writes a report. What is
complete is kept: the same command goes on where a stopped one was.

Systems: colocated-round-robin, colocated-least-requests, static-pd, banaserve,
banaserve-no-migration, banaserve-colocated, banaserve-no-store, or NAME='OPTIONS of serve'.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from tokenizers import Tokenizer

from banaserve import models
from banaserve.arguments import Parser
from banaserve.bench import result
from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.compare_result import (
    CHECK_TOKENS,
    SystemRun,
    Workload,
    as_result,
    check_folder,
    complete_runs,
    folder_of,
    kept_path,
)
from banaserve.bench.compare_systems import REFERENCE, System, chosen_systems
from banaserve.bench.compare_timeline import watched
from banaserve.bench.loops import closed_loop
from banaserve.bench.modelled import modelled_time
from banaserve.bench.report import write_report
from banaserve.bench.servers import Server, banaserve_server
from banaserve.bench.serving_cell import CellId, Progress
from banaserve.bench.serving_items import Dataset, Wanted, Words
from banaserve.bench.serving_run import Plan, run_cells, stopped_by_signals, write_whole
from banaserve.bench.serving_summary import Slo
from banaserve.bench.serving_table import table
from banaserve.errors import UserError

_SAME = ("--dtype", "float32", "--enable-prompt-tokens-details", "--threads-per-instance", "1")


def main(argv: Sequence[str]) -> int:
    """Run what is missing, write results and report; the exit code."""
    given = _parse(argv)
    systems = chosen_systems(given.system, given.instances)
    plan = _plan(given)
    model = models.resolve(given.model, None, lambda line: print(line, flush=True))
    words = Words(Tokenizer.from_file(str(Path(model.path_or_id) / "tokenizer.json")))
    workloads = [Workload(name, _dataset(given, name, words), plan) for name in given.workload]
    check_folder(given, systems, workloads)
    started_at = datetime.now(UTC)
    try:
        asyncio.run(_run(given, systems, workloads, model.served_name))
    except asyncio.CancelledError:
        _write(given, systems, workloads, started_at)
        raise UserError(
            f"interrupted: what is complete is kept in {given.out}; the same command goes on there"
        ) from None
    for page in _write(given, systems, workloads, started_at):
        print(page)
    return 0


def _write(
    given: argparse.Namespace,
    systems: Sequence[System],
    workloads: Sequence[Workload],
    started_at: datetime,
) -> list[Path]:
    """Writes what is complete of each workload, and the report; returns its pages."""
    written = []
    for workload in workloads:
        ran = complete_runs(given, systems, workload)
        if not ran:
            continue
        record = as_result(given, systems, workload, ran, started_at)
        result.write(record, given.out / f"compare-{workload.name}.json")
        written.append(record)
        for name, one in ran.items():
            print(f"\n{workload.name}: {name}")
            Console().print(table(one.cells))
    return write_report(given.out, given.out, "Systems side by side") if written else []


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="banaserve bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("bench-compare"), help="folder of results and report")
    add("--model", default=models.PACKAGED)
    add("--instances", type=int, default=2, help="engines of each system")
    add("--system", action="append", default=[], help="one of those above; repeat (default: all)")
    add("--workload", action="append", default=[], help="dataset of bench serving; repeat")
    add("--data", type=Path, help="folder of named datasets")
    add("--rps", type=lambda text: tuple(map(float, text.split(","))), default=(0.5,))
    add("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=(0, 1, 2))
    add("--requests", type=int, default=16, help="of each rate and seed")
    add("--prompt-tokens", type=int, default=100, help="mean, of made-up prompts")
    add("--prefix-tokens", type=int, default=1000, help="of shared-prefix")
    add("--prefixes", type=int, default=3, help="different ones, of shared-prefix")
    add("--sessions", type=int, default=2, help="chats at once, of multi-turn")
    add("--output-tokens", type=int, default=16)
    add("--warmup", type=float, default=0.0, metavar="S", help="not counted")
    add("--check", type=int, default=4, help="answers of each workload compared with one engine")
    add("--serve-option", action="append", default=[], help="for every system, such as --x=y")
    given = parser.parse_args(list(argv))
    given.workload = given.workload or ["shared-prefix", "multi-turn", "random"]
    return given


def _plan(given: argparse.Namespace) -> Plan:
    plan = Plan(
        arrival="poisson",
        loads=given.rps,
        seeds=given.seeds,
        requests=given.requests,
        duration_s=0.0,
        warm_up_s=given.warmup,
        variation=1.0,
        slo=Slo(),
        exact_output=True,
    )
    plan.check()
    return plan


def _dataset(given: argparse.Namespace, name: str, words: Words) -> Dataset:
    wanted = Wanted(
        dataset=name,
        data=given.data,
        prompt_tokens=given.prompt_tokens,
        prefix_tokens=given.prefix_tokens,
        num_prefixes=given.prefixes,
        sessions=given.sessions,
        output_tokens=given.output_tokens,
        range_fraction=0.5,
        max_prompt_tokens=4000,
    )
    return Dataset(wanted, words)


async def _run(
    given: argparse.Namespace,
    systems: Sequence[System],
    workloads: Sequence[Workload],
    served_name: str,
) -> None:
    reference = await _reference(given, workloads, served_name)
    for system in systems:
        missing = [one for one in workloads if not kept_path(given, system, one).is_file()]
        if not missing:
            print(f"{system.name}: complete", flush=True)
            continue
        print(f"{system.name}: {system.question}", flush=True)
        with stopped_by_signals(), _server(given, system) as server:
            async with OpenAiClient(server.url, served_name, return_token_ids=True) as client:
                for workload in missing:
                    ran = await _one(given, system, workload, server, client, reference)
                    path = kept_path(given, system, workload)
                    write_whole(path, msgspec.json.encode(ran))
                    print(f"  {workload.name}: {ran.equal} of {ran.checked} equal", flush=True)


def _server(given: argparse.Namespace, system: System) -> Any:
    return banaserve_server(given.model, *_SAME, *system.options, *given.serve_option)


async def _one(
    given: argparse.Namespace,
    system: System,
    workload: Workload,
    server: Server,
    client: OpenAiClient,
    reference: dict[str, list[list[int]]],
) -> SystemRun:
    folder = folder_of(given, system, workload)
    await _answers(client, [_call("warm", [7, 8, 9], 2)])
    before_s = server.cpu_s()
    num_before = sum(folder.summary(cell) is not None for cell in workload.plan.cells())
    async with watched(server.url) as timeline:
        cells = await run_cells(
            workload.plan, client, workload.dataset, folder, Progress(), begin=_told
        )
    cpu_s = server.cpu_s() - before_s
    found = await _answers(client, _checked_calls(given, workload))
    equal = sum(a == b for a, b in zip(found, reference[workload.name], strict=True))
    sent = given.requests * (len(cells) - num_before) or 1
    modelled = modelled_time(server.url)
    return SystemRun(
        cells, cpu_s / sent, len(found), equal, server.memory_bytes(), modelled, timeline
    )


def _told(cell: CellId, count: int) -> None:
    print(f"  {cell.name}: {count} requests", flush=True)


async def _reference(
    given: argparse.Namespace, workloads: Sequence[Workload], served_name: str
) -> dict[str, list[list[int]]]:
    """Returns the tokens that one engine gives to the sample of each workload, sent one by one."""
    path = Path(given.out) / "systems" / "summaries" / "reference-tokens.json"
    if path.is_file():
        kept = msgspec.json.decode(path.read_bytes(), type=dict[str, list[list[int]]])
        if all(len(kept.get(one.name, ())) == given.check for one in workloads):
            return kept
    found = {}
    with stopped_by_signals(), _server(given, REFERENCE) as server:
        async with OpenAiClient(server.url, served_name, return_token_ids=True) as client:
            for workload in workloads:
                calls = _checked_calls(given, workload)
                found[workload.name] = [(await _answers(client, [call]))[0] for call in calls]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.encode(found))
    return found


def _checked_calls(given: argparse.Namespace, workload: Workload) -> list[Call]:
    """The first requests of the first cell, which the system has served already."""
    first = workload.plan.cells()[0]
    items = workload.dataset.items(given.requests, first.name, 0)[: given.check]
    return [_call(f"check{n}", item.prompt, CHECK_TOKENS) for n, item in enumerate(items)]


def _call(name: str, prompt: str | list[int], max_tokens: int) -> Call:
    return Call(name, prompt=prompt, max_tokens=max_tokens, extra={"ignore_eos": True})


async def _answers(client: OpenAiClient, calls: Sequence[Call]) -> list[list[int]]:
    records = await closed_loop(client, calls, max(1, len(calls)))
    for record in records:
        if record.error is not None:
            raise UserError(f"a request for checking answers failed: {record.error}")
    return [record.token_ids for record in records]
