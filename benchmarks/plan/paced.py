"""Blind comparison on paced engines: advice on each cell, then its best two systems for real."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from rich.console import Console

from banaserve_bench.loadgen.modelled_time import modelled_time
from banaserve_bench.loadgen.target import ServerUnderTest
from banaserve_bench.plan.confirm.engines import at_server, paced_engines
from banaserve_bench.plan.search.advisor import Tell, advise, screen
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.plan.search.loads import rate_per_s
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from benchmarks.measurement import Measurement, earlier
from benchmarks.plan.blind_cells import BlindCell, blind_cells, question
from benchmarks.plan.blind_records import BlindRecord, samples_of
from benchmarks.plan.foreseen import ForeseenSystem, kept

PART = "paced"
_NOTES = (
    "advice on all cells is written before any engine runs; the cells are a covering subset by a "
    "fixed seed; engines get the first of the loads that judge",
    "pays, right, wrong: by the goodput on engines within the limits, from 1.05 times on; cells "
    "with more than 3% of the steps late are void, and run again with the same command and file",
    "estimate right: cells in which the estimated gain is on the right side of 1.05, whatever its "
    "interval",
    "errors: of the simulator's figures for the requests that engines get, both systems",
)


class Start(NamedTuple):
    """System that serves loads one after another, once started."""

    profile: str
    dilation: float
    system: str


Due = tuple[BlindCell, str]
"""Cell whose load a system has to serve, and the system's kind."""


class BlindComparison:
    """Run of the comparison, which begins where the file of an earlier one ends.

    Raises:
        UserError: The file is a result of something else.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self._measurement = Measurement("plan", given)
        self._console = Console(width=160)
        self._cells = blind_cells()[: given.cells]
        known = earlier(given.json, "plan", {"part": PART, "load_s": given.load_s})
        raw = known.raw if known else {"blind_cells": {}, "commits": []}
        self._records = msgspec.convert(raw["blind_cells"], dict[str, BlindRecord])
        self._modelled = [*known.modelled_time] if known else []
        self._commits = [*dict.fromkeys((*raw["commits"], result.commit()[0]))]
        self._asked = {one: question(one, given.load_s) for one in self._cells}

    def advise(self) -> None:
        """Write the advice on all cells that have none."""
        for cell, asked in self._asked.items():
            if cell.name not in self._records:
                with self._console.status(cell.name) as status:
                    found = advised_record(cell, asked, status.update)
                self._records[cell.name] = found
                self._console.print(_advice_words(cell.name, found))
        self._measurement.keep(self._result())

    def run(self) -> None:
        """Start the systems that have loads to serve, one after another."""
        for start, due in starts_of(self._cells, self._records).items():
            self._console.print(f"starting {start.system}, {start.profile}")
            known = self._asked[due[0][0]].fixed_candidates()
            candidate = next(one for one in known if one.name == start.system)
            with paced_engines(candidate, start.profile, start.dilation) as target:
                for cell, kind in due:
                    self._serve(target, cell, kind)
                told = modelled_time(target.url)
            assert told is not None
            self._modelled.append(told)
            self._measurement.keep(self._result())

    def _serve(self, target: ServerUnderTest, cell: BlindCell, kind: str) -> None:
        asked, record = self._asked[cell], self._records[cell.name]
        # Each load of a server has a seed of its own, since the server caches prompts.
        number = self._cells.index(cell)
        found = at_server(target, None, asked.loads.others[0], asked.limits, number)
        served = record.systems[kind].served(found)
        self._records[cell.name] = msgspec.structs.replace(record, **{kind: served})
        self._console.print(f"  {cell.name}: {served.words}")

    def deliver(self) -> None:
        """Print the verdicts and the figures, and write the result."""
        for name, record in self._records.items():
            measured = f", measured {record.measured:.2f}" if record.is_run else ""
            words = (
                f"{record.words}: {name}: told {record.told}, {record.gain.estimate:.2f}{measured}"
            )
            self._console.print(words)
        self._measurement.deliver(self._result())

    def _result(self) -> Result:
        return self._measurement.result(
            samples_of(self._records.values()),
            _NOTES,
            raw={"blind_cells": msgspec.to_builtins(self._records), "commits": self._commits},
            modelled_time=self._modelled,
        )


def measure_cells(given: argparse.Namespace) -> int:
    """Ask for advice on all cells, then run their systems; return the exit code."""
    comparison = BlindComparison(given)
    comparison.advise()
    comparison.run()
    comparison.deliver()
    return 0


def advised_record(cell: BlindCell, asked: PlanQuestion, tell: Tell) -> BlindRecord:
    """Return the advice on a cell, and the figures predicted for the requests that engines get."""
    advice = advise(asked, screen(asked, tell), tell)
    assert advice.challenger is not None
    assert advice.found is not None
    rows = asked.loads.others[0]

    def foreseen(candidate: Candidate) -> ForeseenSystem:
        found = asked.run(candidate, rows, asked.scenarios[1])
        return ForeseenSystem(candidate.name, kept(found))

    return BlindRecord(
        num_requests=len(rows),
        rate_per_s=rate_per_s(rows),
        duration_s=rows[-1].at_s,
        limits=asked.limits,
        dilation=cell.dilation,
        told=advice.answer,
        gain=advice.found.whole,
        colocated=foreseen(advice.rival),
        split=foreseen(advice.challenger),
    )


def starts_of(
    cells: Sequence[BlindCell], records: Mapping[str, BlindRecord]
) -> dict[Start, list[Due]]:
    """Return the systems to start, each with the loads that it has to serve."""
    found: dict[Start, list[Due]] = defaultdict(list)
    for cell in cells:
        for kind, one in records[cell.name].systems.items():
            if one.is_due:
                found[Start(cell.profile, cell.dilation, one.name)].append((cell, kind))
    return found


def _advice_words(name: str, record: BlindRecord) -> str:
    low, estimate, high = record.gain
    return (
        f"{name}: {record.told}, {estimate:.2f} ({low:.2f} to {high:.2f}) times: "
        f"{record.split.name} for {record.colocated.name}, {record.num_requests} requests"
    )
