"""Serving run: its cells in sequence, kept in a folder; a stopped run is resumed.

DIR/run.json             options of the run; a run with other options is refused there
DIR/records/*.jsonl      the requests of each complete cell; *.part.jsonl: of a stopped one
DIR/summaries/*.json     the figures of each complete cell
DIR/result.json          the result, after each cell; complete only if it says so
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve_bench.datasets.items import Dataset, Item
from banaserve_bench.loadgen.arrivals import arrival_times_s
from banaserve_bench.loadgen.client import OpenAiClient
from banaserve_bench.results import result
from banaserve_bench.serving.cell import CellFile, CellId, Ended, run_cell
from banaserve_bench.serving.summary import Slo, Summary, summarize, unit_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """Load, cells and limits of a serving run.

    Attributes:
        loads: Requests a second, or with ``closed`` arrivals requests in progress; a single None
            runs a trace at its own speed.
        requests: Number of requests of each cell; None for as many as arrive in warm-up and
            ``duration_s``.
        variation: Coefficient of variation of the gaps of gamma arrivals.
    """

    arrival: str
    loads: tuple[float | None, ...]
    seeds: tuple[int, ...]
    requests: int | None
    duration_s: float
    warm_up_s: float
    variation: float
    slo: Slo
    exact_output: bool

    def cells(self) -> list[CellId]:
        """Return all cells, seeds outermost: a run stopped early has all loads of its seeds."""
        is_closed = self.arrival == "closed"
        return [CellId(load, seed, is_closed) for seed in self.seeds for load in self.loads]

    def check(self) -> None:
        """Check that the plan has requests to send and no cell twice.

        Raises:
            UserError: The plan is invalid.
        """
        if self.requests is not None and self.requests < 1:
            raise UserError("--requests: give 1 or more")
        if len(set(self.seeds)) < len(self.seeds):
            raise UserError("--seeds: give each once")
        cells = self.cells()
        for cell in cells:
            self.count(cell)
            if cell.is_closed and cell.load is not None and cell.load % 1:
                raise UserError(f"--concurrency {cell.load:g}: give a whole number")
        if len({cell.name for cell in cells}) < len(cells):
            raise UserError("--rps, --concurrency: give each once, different in six digits")

    def count(self, cell: CellId) -> int:
        """Return the number of requests of a cell."""
        if self.requests is not None:
            return self.requests
        if cell.is_closed or cell.load is None:
            raise UserError(
                "give --rps; a closed loop or a trace at its own speed needs --requests"
            )
        return max(2, round(cell.load * (self.warm_up_s + self.duration_s)))


class RunFolder:
    """Folder of a run's options, records and figures.

    Args:
        asked: Options that must be equal for a run to be resumed there.

    Raises:
        UserError: The folder holds another run, or cannot be written.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any]) -> None:
        self.path = path
        self.records = path / "records"
        note = path / "run.json"
        told = msgspec.json.format(msgspec.json.encode(asked, order="sorted"), indent=1)
        try:
            if note.is_file():
                if note.read_bytes() != told:
                    raise UserError(
                        f"{path} holds a run with other options: give another --out, or remove it"
                    )
                return
            if path.exists() and any(path.iterdir()):
                raise UserError(f"{path} holds something else: give an empty folder with --out")
            self.records.mkdir(parents=True, exist_ok=True)
            (path / "summaries").mkdir(exist_ok=True)
            note.write_bytes(told)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error

    def summary(self, cell: CellId) -> Summary | None:
        """Return the figures of a complete cell; None for any other cell."""
        try:
            data = (self.path / "summaries" / f"{cell.name}.json").read_bytes()
            return msgspec.json.decode(data, type=Summary)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"{self.path} is damaged ({error}): give another --out") from error

    def keep(self, cell: CellId, summary: Summary) -> None:
        result.write_whole(
            self.path / "summaries" / f"{cell.name}.json", msgspec.json.encode(summary)
        )


async def run_cells(
    plan: ServingPlan,
    client: OpenAiClient,
    dataset: Dataset,
    folder: RunFolder,
    begin: Callable[[CellId, int], Ended],
) -> list[Summary]:
    """Run the cells that ``folder`` lacks; return the figures of all.

    Args:
        begin: Callback with each cell and its number of requests, before the cell runs; returns
            the receiver of the cell's progress.

    Raises:
        UserError: Every request of a cell failed, or none came after the warm-up; the records are
            kept.
        asyncio.CancelledError: The run was stopped; complete cells are kept.
    """
    found = []
    for cell in plan.cells():
        summary = folder.summary(cell)
        if summary is None:
            ended = begin(cell, plan.count(cell))
            summary = await _run_one(plan, cell, client, dataset, folder, ended)
            if not summary.requests:
                raise UserError(
                    f"all {summary.warm_up_requests} requests of {cell.name} were sent in the "
                    "warm-up, so none counts: give more --requests or a shorter --warmup"
                )
            if not summary.completed:
                error = max(summary.errors, key=lambda one: summary.errors[one])
                raise UserError(
                    f"every request of {cell.name} failed, most often with: {error} "
                    f"(records: {folder.records / cell.name}.jsonl)"
                )
            folder.keep(cell, summary)
        found.append(summary)
    return found


def requests_of(
    plan: ServingPlan, cell: CellId, dataset: Dataset
) -> tuple[list[Item], list[float] | None]:
    """Return the requests of a cell and their arrival times; no times with ``closed`` arrivals."""
    items = dataset.items(plan.count(cell), cell.name, plan.cells().index(cell))
    arrivals_s = arrival_times_s(
        plan.arrival,
        len(items),
        seed=cell.seed,
        rate_per_s=None if cell.is_closed else cell.load,
        variation=plan.variation,
        trace_s=[item.at_s for item in items if item.at_s is not None] or None,
    )
    return items, arrivals_s


async def _run_one(
    plan: ServingPlan,
    cell: CellId,
    client: OpenAiClient,
    dataset: Dataset,
    folder: RunFolder,
    ended: Ended,
) -> Summary:
    items, arrivals_s = requests_of(plan, cell, dataset)
    with CellFile(folder.records, cell) as keep:
        sent, client_cpu_fraction = await run_cell(
            client,
            items,
            arrivals_s,
            cell=cell,
            warm_up_s=plan.warm_up_s,
            exact_output=plan.exact_output,
            keep=keep,
            ended=ended,
        )
    return summarize(cell, sent, plan.slo, client_cpu_fraction)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let SIGINT and SIGTERM cancel the current task; needs a running event loop."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def as_result(
    summaries: Sequence[Summary],
    *,
    options: Mapping[str, Any],
    started_at: datetime,
    num_cells: int,
    notes: Sequence[str] = (),
) -> result.Result:
    """Return the run in the format of all benchmarks: a sample for each seed of each figure.

    A figure is called ``{metric}_at_{load}``.
    """
    is_complete = len(summaries) == num_cells
    told = list(notes)
    if not is_complete:
        told.append(f"INCOMPLETE: {len(summaries)} of {num_cells} cells")
    return result.result(
        "serving",
        seed=summaries[0].seed if summaries else 0,
        options=dict(options),
        started_at=started_at,
        figures=figures(summaries),
        notes=told,
        raw={"cells": msgspec.to_builtins(list(summaries)), "is_complete": is_complete},
    )


def figures(summaries: Sequence[Summary], prefix: str = "") -> dict[str, result.Figure]:
    """Return each metric at each load, without those that some seed lacks at that load."""
    by_load: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_load.setdefault(summary.load_name, []).append(summary)
    found = {}
    for load, same in by_load.items():
        for metric in same[0].metrics:
            values = [one.metrics[metric] for one in same if metric in one.metrics]
            if len(values) == len(same):
                found[f"{prefix}{metric}_at_{load}"] = result.figure(values, unit_of(metric))
    return found
