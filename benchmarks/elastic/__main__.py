"""Is the elastic policy as good as the best fixed arrangement in hindsight, whichever that is?

    python -m benchmarks elastic [--quick | --full] [--data FOLDER] [--instances 4] [--json FILE]
    python -m benchmarks elastic --ablation --cells 8     # without each of its parts
    python -m benchmarks elastic --constant [--minutes 30]   # does it come to rest?

Simulated: step times come from a cost model, nothing is run. All systems of a cell meet the same
requests; time and throughput count from the first arrival to the last token. Azure's and Mooncake's
traces take part where --data, or BANASERVE_DATA, names their folder.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.console import Console
from rich.table import Table

from banaserve.arguments import Parser
from banaserve.bench.datasets.files import data_folder
from banaserve.bench.results import result
from banaserve.bench.results.result import Figure
from benchmarks.elastic.cells import cells
from benchmarks.elastic.constant import (
    constant_cells,
    constant_figures,
    constant_table,
    run_constant,
)
from benchmarks.elastic.figures import ablation_table, figures, table
from benchmarks.elastic.runs import WHOLE, Variant, run_cell
from benchmarks.script import run_script

Outcome = TypeVar("Outcome")

_QUICK, _COVERING = 8, 60
PARTS = {
    "legs": Variant({"routing": "load_aware"}, {"routing": "load_aware", "routing_options": {}}),
    "chunks": Variant({"chunks": "2048"}),
    "roles": Variant({"roles": "fixed"}),
    "layers": Variant({"modules": "layers"}),
    "heads": Variant({"modules": "heads"}),
    "modules": Variant({"modules": "layers,heads"}),
}
"""The elastic system without one of its parts, by its name; with modules, which it leaves alone."""


def main(argv: Sequence[str]) -> int:
    """Run the cells, show and write them; the exit code."""
    parser = Parser(prog="python -m benchmarks elastic", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{_QUICK} cells")
    size.add_argument("--full", action="store_true", help="all cells: days")
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
    if given.constant:
        options, found_figures, shown, raw = _constant(given, console)
    else:
        options, found_figures, shown, raw = _compared(given, console)
    console.print(shown)
    record = result.result(
        "elastic",
        seed=0,
        options=options,
        started_at=started_at,
        figures=found_figures,
        notes=[str(__doc__)],
        raw=raw,
    )
    console.print(result.table(record))
    if given.json is not None:
        result.write(record, given.json)
    return 0


_Told = tuple[dict[str, Any], dict[str, Figure], Table, dict[str, Any]]
"""Options, figures, a table and raw outcomes."""


def _compared(given: Namespace, console: Console) -> _Told:
    data = data_folder(given.data)
    how_many = 0 if given.full else _QUICK if given.quick else given.cells
    chosen = cells(how_many, data is not None)
    without = () if given.ablation is None else given.ablation or tuple(PARTS)
    variants = {"elastic": WHOLE} | {name: PARTS[name] for name in without}
    run = partial(run_cell, size=given.instances, data=data, variants=variants)
    found = []
    for number, one in enumerate(_mapped(run, chosen, given.jobs), start=1):
        found.append(one)
        own, best = one.elastic["elastic"], one.fixed[one.best]
        console.print(
            f"{number}/{len(chosen)} {one.cell.name}: elastic {own.goodput:.3f}, "
            f"{one.best} {best.goodput:.3f}"
        )
    options = {
        "cells": len(chosen),
        "instances": given.instances,
        "traces": data is not None,
        "ablation": list(without),
    }
    raw = {one.cell.name: msgspec.to_builtins((one.fixed, one.elastic)) for one in found}
    if without:
        console.print(ablation_table(found))
    return options, figures(found), table(found), raw


def _constant(given: Namespace, console: Console) -> _Told:
    chosen = constant_cells()
    run = partial(run_constant, size=given.instances, minutes=given.minutes)
    found = []
    for number, one in enumerate(_mapped(run, chosen, given.jobs), start=1):
        found.append(one)
        console.print(
            f"{number}/{len(chosen)} {one.cell.name}: {one.changes_a_minute:.2f} changes a minute"
        )
    options = {"constant": True, "instances": given.instances, "minutes": given.minutes}
    raw = {one.cell.name: msgspec.to_builtins(one) for one in found}
    return options, constant_figures(found), constant_table(found), raw


def _mapped(run: Callable[[Any], Outcome], cells: Sequence[Any], jobs: int) -> Iterator[Outcome]:
    # Spawned: the parent may have threads.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run, cells)


if __name__ == "__main__":
    run_script(main)
