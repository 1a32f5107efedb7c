"""Cost of a router for a request, and of a policy's decision: ``python -m benchmarks router``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.arguments import positive
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.router import decisions, proxy


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("router", given)
    figures: Samples = {}
    notes: list[str] = []
    raw: dict[str, object] = {}
    if given.only != "proxy":
        figures, notes, raw = decisions.figures(given.runs, given.seed, given.insertions)
    if given.only != "decisions":
        proxy_figures, proxy_notes = proxy.figures(given)
        figures, notes = {**figures, **proxy_figures}, [*notes, *proxy_notes]
    record = measurement.result(figures, notes, raw=raw)
    measurement.deliver(record)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("router", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=5)
    add("--requests", type=positive, default=4000)
    add("--streams", type=positive, default=256)
    add("--rate", type=float, default=200.0, help="requests/s where latency is compared")
    add("--policy", default="cache_aware", help="of banaserve route")
    add("--processes", type=positive, default=1, help="of banaserve route: measure so many, too")
    add("--peers", type=Path, metavar="FOLDER", help="install the other routers there and compare")
    add("--insertions", type=positive, default=10_000_000, help="into the bounded prefix tree")
    add("--only", choices=("decisions", "proxy"), help="one part of the two")
    add("--seed", type=int, default=0)
    return parser.parse_args(list(argv))
