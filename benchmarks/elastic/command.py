"""Is the elastic policy as good as the best fixed arrangement in hindsight, whichever that is?

    python -m benchmarks elastic [--cells 60] [--data FOLDER] [--instances 4] [--json FILE]
    python -m benchmarks elastic --ablation --cells 8     # without each of its parts

Simulated: step times come from a cost model, no engine runs. All systems of a cell get the same
requests; time and throughput count from the first arrival to the last token. Traces of Azure,
Mooncake and ServeGen take part where --data, or BANASERVE_DATA, names their folder. An interrupted
run is resumed from its --json if the code is still the same.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from banaserve.base.arguments import positive
from banaserve_bench.datasets.files import data_folder
from benchmarks.elastic.cells import cells
from benchmarks.elastic.figures import figures, told
from benchmarks.elastic.runs import WHOLE, CellOutcome, Variant, run_cell
from benchmarks.measurement import Measurement, earlier, parser_of
from benchmarks.workers import workers

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
    parser = parser_of("elastic", __doc__)
    add = parser.add_argument
    add("--cells", type=positive, default=60, help="of the covering subset")
    add("--instances", type=positive, default=4)
    add("--ablation", action="store_true", help="also without each part, and with modules")
    add("--data", type=Path)
    add("--jobs", type=positive, default=2)
    given = parser.parse_args(list(argv))
    data = data_folder(given.data)
    parts = PARTS if given.ablation else {}
    options = {
        "cells": given.cells,
        "instances": given.instances,
        "traces": data is not None,
        "ablation": list(parts),
    }
    measurement = Measurement("elastic", Namespace(json=given.json, **options))
    left = earlier(given.json, "elastic", options, same_code=True)
    found = [msgspec.convert(one, CellOutcome) for one in left.raw["outcomes"]] if left else []
    chosen = cells(given.cells, data is not None)
    run = partial(run_cell, size=given.instances, data=data, variants={"elastic": WHOLE, **parts})
    with workers(given.jobs) as pool:
        for one in pool.map(run, chosen[len(found) :]):
            found.append(one)
            print(f"{len(found)}/{len(chosen)} {told(one)}", flush=True)
            raw = {"outcomes": [msgspec.to_builtins(each) for each in found]}
            left = measurement.result(figures(found), [str(__doc__)], raw=raw)
            measurement.keep(left)
    assert left is not None
    measurement.deliver(left)
    return 0
