"""Is the elastic policy as good as the best fixed arrangement in hindsight, whichever that is?

    python -m benchmarks elastic [--quick | --full] [--data FOLDER] [--instances 4] [--json FILE]

Simulated: step times come from a cost model, nothing is run. All systems of a cell meet the same
requests; time and throughput count from the first arrival to the last token. Azure's and Mooncake's
traces take part where --data, or BANASERVE_DATA, names their folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import msgspec
from rich.console import Console

from banaserve.arguments import Parser
from banaserve.bench.datasets.files import data_folder
from banaserve.bench.results import result
from benchmarks.elastic.cells import cells
from benchmarks.elastic.figures import figures, table
from benchmarks.elastic.runs import run_cell
from benchmarks.script import run_script

_QUICK, _COVERING = 8, 60
_WHOLE: dict[str, dict[str, object]] = {"elastic": {}}
_PARTS: dict[str, dict[str, object]] = {
    "legs": {"routing": "load_aware"},
    "chunks": {"chunks": "2048"},
    "roles": {"roles": "fixed"},
}


def main(argv: Sequence[str]) -> int:
    """Run the cells, show and write them; the exit code."""
    parser = Parser(prog="python -m benchmarks elastic", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{_QUICK} cells")
    size.add_argument("--full", action="store_true", help="all cells: days")
    parser.add_argument("--cells", type=int, default=_COVERING, help="of the covering subset")
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument(
        "--ablation",
        nargs="*",
        choices=tuple(_PARTS),
        help="also without these parts, or without each in turn",
    )
    parser.add_argument("--data", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(list(argv))
    started_at, console = datetime.now(UTC), Console(width=230)
    data = data_folder(given.data)
    how_many = 0 if given.full else _QUICK if given.quick else given.cells
    chosen = cells(how_many, data is not None)
    without = () if given.ablation is None else given.ablation or tuple(_PARTS)
    variants = _WHOLE | {name: _PARTS[name] for name in without}
    run = partial(run_cell, size=given.instances, data=data, variants=variants)
    found = []
    # Spawned: the parent may have threads.
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        for number, one in enumerate(pool.map(run, chosen), start=1):
            found.append(one)
            own, best = one.elastic["elastic"], one.fixed[one.best]
            console.print(
                f"{number}/{len(chosen)} {one.cell.name}: elastic {own.goodput:.3f}, "
                f"{one.best} {best.goodput:.3f}"
            )
    console.print(table(found))
    record = result.result(
        "elastic",
        seed=0,
        options={
            "cells": len(chosen),
            "instances": given.instances,
            "traces": data is not None,
            "ablation": list(without),
        },
        started_at=started_at,
        figures=figures(found),
        notes=[str(__doc__)],
        raw={one.cell.name: msgspec.to_builtins((one.fixed, one.elastic)) for one in found},
    )
    console.print(result.table(record))
    if given.json is not None:
        result.write(record, given.json)
    return 0


if __name__ == "__main__":
    run_script(main)
