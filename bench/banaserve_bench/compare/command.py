"""Compare systems on this machine, on the same requests.

Starts the systems one by one, sends each the same requests at the same times, checks a sample of
the answers token by token against a single vLLM engine, and writes a report. Complete parts are
kept: the same command resumes a stopped run. Between two cells, roles and modules that the
orchestrator has moved are moved back.

Systems: colocated-round-robin, colocated-least-requests, colocated-prefix-affinity, static-pd,
banaserve, banaserve-no-migration, banaserve-colocated, banaserve-no-store, or NAME='OPTIONS of
serve'.

With --pace all engines keep the time of a modelled GPU: rates, latencies and durations are then in
modelled seconds, and the report also shows the simulator's figures for the same requests.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.terminal.console import print_rows
from banaserve.contracts.control_api import RoleRequest
from banaserve.contracts.migration_api import Return
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.pacing import miniatures
from banaserve_bench.compare import options as compare_options
from banaserve_bench.compare.options import make_parser, parse, plans
from banaserve_bench.compare.result import (
    CHECK_TOKENS,
    SystemRun,
    Workload,
    as_result,
    check_folder,
    complete_runs,
    folder_of,
    kept_path,
)
from banaserve_bench.compare.simulated import simulated_cells
from banaserve_bench.compare.systems import REFERENCE, ServerSystem, chosen_systems
from banaserve_bench.datasets.items import Words
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.servers import Running, balanced_servers, banaserve_server
from banaserve_bench.report.report import write_report
from banaserve_bench.results import result
from banaserve_bench.serving.cell import CellId, Ended
from banaserve_bench.serving.command import summary_rows
from banaserve_bench.serving.run import run_cells, stopped_by_signals
from banaserve_bench.serving.timeline import decisions_of, watched

__all__ = ["main", "make_parser"]

_TIMEOUT_S = 120.0
_AGAIN_S = 0.5


class StartPlacement:
    """Roles and modules of a server as they were at its start.

    A cell that began with the placement left by the cell before would also measure that cell, and
    would not correspond to a cell of the simulator.

    Args:
        admin: Admin client of a server that has served no request yet.

    Raises:
        UserError: The server cannot be reached.
    """

    def __init__(self, admin: AdminClient) -> None:
        self._admin = admin
        self._roles = {one.id: one.role for one in admin.placement().instances}

    def restore(self) -> None:
        """Return when the start's roles and modules are back; pauses the orchestrator. Blocking.

        Raises:
            UserError: The placement is not restored within two minutes.
        """
        self._admin.set_paused(True)
        until_s = time.monotonic() + _TIMEOUT_S
        try:
            while problem := self._step():
                if time.monotonic() > until_s:
                    raise UserError(f"the start's placement does not come back: {problem}")
                time.sleep(_AGAIN_S)
        finally:
            self._admin.set_paused(False)

    def _step(self) -> str:
        """Undo one change; return a description of it, empty if nothing is left to undo."""
        placement = self._admin.placement()
        if any(migration.is_open for migration in placement.migrations):
            return "a move is under way"
        try:
            for one in placement.instances:
                if one.units:
                    self._admin.run(Return(one.id))
                    return f"{one.id} has modules away"
            for one in placement.instances:
                if one.role != self._roles.get(one.id, one.role):
                    change = self._admin.roles.begin(RoleRequest(one.id, self._roles[one.id]))
                    while change.is_open:
                        change = self._admin.roles.show(change.id, wait_s=_AGAIN_S)
                    return f"{one.id} is {one.role}"
        except UserError as error:
            return str(error)
        return ""


_SAME = ("--dtype", "float32", "--enable-prompt-tokens-details", "--threads-per-instance", "1")
_SMALL = ("--kv-cache-memory-bytes", str(256 << 20))


def main(argv: Sequence[str]) -> int:
    """Run what is missing, write results and report; return the exit code."""
    given = parse(argv, __doc__)
    systems = chosen_systems(given.system, given.instances)
    asked = plans(given)
    model = _resolved(given)
    words = Words.of(model.path_or_id)
    workloads = compare_options.workloads(given, asked, words)
    check_folder(given, systems, workloads)
    started_at = datetime.now(UTC)
    try:
        asyncio.run(_run(given, systems, workloads, model))
    except (asyncio.CancelledError, KeyboardInterrupt):
        _write(given, systems, workloads, started_at)
        raise UserError(
            f"interrupted: what is complete is kept in {given.out}; the same command goes on there"
        ) from None
    _write(given, systems, workloads, started_at)
    return 0


def _resolved(given: argparse.Namespace) -> models.ResolvedModel:
    def say(line: str) -> None:
        print(line, flush=True)

    if given.profile is not None:
        return miniatures.resolve(given.profile, say)
    return models.resolve(given.model, None, say)


def _write(
    given: argparse.Namespace,
    systems: Sequence[ServerSystem],
    workloads: Sequence[Workload],
    started_at: datetime,
) -> None:
    """Write the complete runs of each workload and the report; print the report's path."""
    complete = {one.name: complete_runs(given, systems, one) for one in workloads}
    for workload in workloads:
        ran = complete[workload.name]
        if not ran:
            continue
        simulated = simulated_cells(given, systems, workload)
        record = as_result(given, systems, workload, ran, simulated, started_at)
        result.write(record, given.out / f"compare-{workload.name}.json")
        for name, one in ran.items():
            print(f"\n{workload.name}: {name}")
            print_rows(summary_rows(one.cells), {})
    if any(complete.values()):
        print(write_report(given.out, given.out, "Systems side by side"))


async def _run(
    given: argparse.Namespace,
    systems: Sequence[ServerSystem],
    workloads: Sequence[Workload],
    model: models.ResolvedModel,
) -> None:
    # Ctrl-C while a server starts: asyncio's own handler waits for the next await.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reference = await _reference(given, workloads, model)
    clock = StretchedClock(given.dilate)
    for system in systems:
        missing = [one for one in workloads if not kept_path(given, system, one).is_file()]
        if not missing:
            print(f"{system.name}: complete", flush=True)
            continue
        print(f"{system.name}: {system.question}", flush=True)
        with TemporaryDirectory(prefix="bench-") as folder:
            log = Path(folder) / "decisions.jsonl"
            with _server(given, system, log) as server, stopped_by_signals():
                async with OpenAiClient(
                    server.url, model.served_name, return_token_ids=True, clock=clock
                ) as client:
                    start = None
                    if system.has_orchestrator:
                        start = StartPlacement(AdminClient(*find_admin(_run_dir(log))))
                    for workload in missing:
                        ran = await _one(
                            given, system, workload, server, client, reference, log, start
                        )
                        result.write_whole(
                            kept_path(given, system, workload), msgspec.json.encode(ran)
                        )
                        print(f"  {workload.name}: {ran.equal} of {ran.checked} equal", flush=True)


def _server(
    given: argparse.Namespace, system: ServerSystem, log: Path
) -> AbstractContextManager[Running]:
    options = [*_SAME, *system.options, *given.serve_option]
    if given.profile is not None:
        options += ["--pace", given.pace, "--dilate", f"{given.dilate:g}"]
    if system.has_orchestrator:
        options += ["--decision-log", str(log), "--run-dir", str(_run_dir(log))]
    if system.num_servers > 1:
        return balanced_servers(system.num_servers, system.policy, given.model, *options)
    return banaserve_server(given.model, *options)


async def _one(
    given: argparse.Namespace,
    system: ServerSystem,
    workload: Workload,
    server: Running,
    client: OpenAiClient,
    reference: dict[str, list[list[int]]],
    log: Path,
    start: StartPlacement | None,
) -> SystemRun:
    folder = folder_of(given, system, workload)
    await _answers(client, [CompletionCall.exact("warm", [7, 8, 9], 2)])
    lacking = [cell for cell in workload.plan.cells() if folder.summary(cell) is None]
    before_s, began_s = server.cpu_s(), time.time()

    def begin(cell: CellId, count: int) -> Ended:
        if start is not None:
            start.restore()
        print(f"  {cell.name}: {count} requests", flush=True)
        return lambda num_ended, num_failed: None

    async with watched(server.url, client.clock) as timeline:
        cells = await run_cells(workload.plan, client, workload.dataset, folder, begin)
    cpu_s = server.cpu_s() - before_s
    found = await _answers(client, _checked_calls(given, workload))
    equal = sum(a == b for a, b in zip(found, reference[workload.name], strict=True))
    return SystemRun(
        cells,
        cpu_s / (sum(map(workload.plan.count, lacking)) or 1),
        len(found),
        equal,
        server.memory_bytes(),
        modelled_time(server.url),
        timeline,
        decisions_of(log, began_s, given.dilate),
    )


def _run_dir(log: Path) -> Path:
    return log.with_name("run")


async def _reference(
    given: argparse.Namespace, workloads: Sequence[Workload], model: models.ResolvedModel
) -> dict[str, list[list[int]]]:
    """Return the tokens that one engine gives to the sample of each workload, sent one by one.

    The reference engine runs in real time, even where the systems' time is modelled.
    """
    path = Path(given.out) / "systems" / "summaries" / "reference-tokens.json"
    if path.is_file():
        kept = msgspec.json.decode(path.read_bytes(), type=dict[str, list[list[int]]])
        if all(len(kept.get(one.name, ())) == given.check for one in workloads):
            return kept
    found = {}
    name = model.served_name
    options = [*_SAME, *REFERENCE.options, "--served-model-name", name]
    options += _SMALL if given.profile is not None else given.serve_option
    with banaserve_server(model.path_or_id, *options) as server, stopped_by_signals():
        async with OpenAiClient(server.url, name, return_token_ids=True) as client:
            for workload in workloads:
                calls = _checked_calls(given, workload)
                found[workload.name] = [(await _answers(client, [call]))[0] for call in calls]
    result.write_whole(path, msgspec.json.encode(found))
    return found


def _checked_calls(given: argparse.Namespace, workload: Workload) -> list[CompletionCall]:
    """Return the first requests of the first cell, which the system has already served."""
    first = workload.plan.cells()[0]
    items = workload.dataset.items(workload.plan.count(first), first.name, 0)[: given.check]
    return CompletionCall.numbered((item.prompt for item in items), CHECK_TOKENS)


async def _answers(client: OpenAiClient, calls: Sequence[CompletionCall]) -> list[list[int]]:
    records = await closed_loop(client, calls, max(1, len(calls)))
    return [record.checked().token_ids for record in records]
