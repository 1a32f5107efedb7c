"""Is the elastic policy as good as the best fixed arrangement in hindsight, whichever that is?

    python -m benchmarks elastic [--quick | --full] [--data FOLDER] [--instances 4] [--json FILE]
    python -m benchmarks elastic --ablation --cells 8     # without each of its parts
    python -m benchmarks elastic --constant [--minutes 30]   # does it come to rest?
    python -m benchmarks elastic --code [TRACE]           # code completion, drawn or from a file

Simulated: step times come from a cost model, no engine runs. All systems of a cell get the same
requests; time and throughput count from the first arrival to the last token. Traces of Azure,
Mooncake and ServeGen take part where --data, or BANASERVE_DATA, names their folder. An interrupted
run is resumed from its --json if the code is still the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.datasets.files import data_folder
from banaserve_bench.results import result
from banaserve_bench.results.result import Figure
from benchmarks.elastic.cells import cells, code_cells
from benchmarks.elastic.constant import (
    ConstantOutcome,
    constant_cells,
    constant_figures,
    constant_table,
    run_constant,
)
from benchmarks.elastic.figures import ablation_table, figures, table
from benchmarks.elastic.runs import WHOLE, CellOutcome, Variant, run_cell
from benchmarks.workers import workers

Outcome = TypeVar("Outcome")

_QUICK, _COVERING = 8, 60
_DRAWN = "drawn"
PARTS = {
    "legs": Variant({"routing": "load_aware"}, {"routing": "load_aware", "routing_options": {}}),
    "chunks": Variant({"chunks": "2048"}),
    "roles": Variant({"roles": "fixed"}),
    "layers": Variant({"modules": "layers"}),
    "heads": Variant({"modules": "heads"}),
    "modules": Variant({"modules": "layers,heads"}),
}
"""Variants: the elastic system without a part, or with modules, which it does not move itself."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m benchmarks elastic", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{_QUICK} cells")
    size.add_argument("--full", action="store_true", help="all cells: days")
    size.add_argument(
        "--code",
        nargs="?",
        const=_DRAWN,
        metavar="TRACE",
        help="code completion; of a trace in Azure's or Mooncake's format",
    )
    size.add_argument("--constant", action="store_true", help="changes under constant load")
    parser.add_argument("--cells", type=int, default=_COVERING, help="of the covering subset")
    parser.add_argument("--minutes", type=float, default=30.0, help="of constant load, simulated")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument(
        "--ablation",
        nargs="*",
        choices=tuple(PARTS),
        help="also without these parts (layers, heads, modules: with them), or each in turn",
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(list(argv))
    started_at, console = datetime.now(UTC), Console(width=230)
    run = _constant if given.constant else _compared
    shown, record = None, None
    for told in run(given, console):
        shown, found, raw, options = told
        record = result.result(
            "elastic",
            seed=0,
            options=options,
            started_at=started_at,
            figures=found,
            notes=[str(__doc__)],
            raw=raw,
        )
        if given.json is not None:
            result.write(record, given.json)
    assert shown is not None
    assert record is not None
    console.print(shown)
    console.print(result.table(record))
    return 0


_Told = tuple[Table, dict[str, Figure], dict[str, Any], dict[str, Any]]
"""A table, figures, raw outcomes and options."""


def _compared(given: Namespace, console: Console) -> Iterator[_Told]:
    """Yield the results so far, after each cell."""
    data = data_folder(given.data)
    how_many = 0 if given.full else _QUICK if given.quick else given.cells
    if given.code is None:
        chosen = cells(how_many, data is not None)
    else:
        data = None if given.code == _DRAWN else Path(given.code)
        if data is not None and not data.is_file():
            raise UserError(f"--code {data}: there is no such file; without one lengths are drawn")
        chosen = code_cells(data is not None)
    without = () if given.ablation is None else given.ablation or tuple(PARTS)
    variants = {"elastic": WHOLE} | {name: PARTS[name] for name in without}
    options = {
        "cells": len(chosen),
        "instances": given.instances,
        "traces": data is not None,
        "ablation": list(without),
    }
    if given.code is not None:
        options["code"] = Path(given.code).name
    kept = _kept(given.json, options)
    run = partial(run_cell, size=given.instances, data=data, variants=variants)
    found: list[CellOutcome] = []
    for one in chain(kept, _mapped(run, chosen[len(kept) :], given.jobs)):
        found.append(one)
        own, best = one.elastic["elastic"], one.fixed[one.best]
        console.print(
            f"{len(found)}/{len(chosen)} {one.cell.name}: elastic {own.goodput:.3f}, "
            f"{one.best} {best.goodput:.3f}"
        )
        raw = {"outcomes": [msgspec.to_builtins(each) for each in found]}
        yield table(found), figures(found), raw, options
    if without:
        console.print(ablation_table(found))


def _kept(path: Path | None, options: Mapping[str, Any]) -> list[CellOutcome]:
    """Return the cells that an interrupted run of the same code and options has left."""
    if path is None or not path.exists():
        return []
    left = result.read(path)
    is_same = (left.name, left.options) == ("elastic", dict(options))
    if not is_same or left.dirty or (left.commit, left.dirty) != result.commit():
        return []
    return [msgspec.convert(one, CellOutcome) for one in left.raw["outcomes"]]


def _constant(given: Namespace, console: Console) -> Iterator[_Told]:
    chosen = constant_cells()
    run = partial(run_constant, size=given.instances, minutes=given.minutes)
    options = {"constant": True, "instances": given.instances, "minutes": given.minutes}
    found: list[ConstantOutcome] = []
    for one in _mapped(run, chosen, given.jobs):
        found.append(one)
        console.print(
            f"{len(found)}/{len(chosen)} {one.cell.name}: "
            f"{one.changes_a_minute:.2f} changes a minute"
        )
        raw = {"outcomes": [msgspec.to_builtins(each) for each in found]}
        yield constant_table(found), constant_figures(found), raw, options


def _mapped(run: Callable[[Any], Outcome], cells: Sequence[Any], jobs: int) -> Iterator[Outcome]:
    with workers(jobs) as pool:
        yield from pool.map(run, cells)
