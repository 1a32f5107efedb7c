"""Cost of a router for a request, and of a policy's decision: ``python -m benchmarks router``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from banaserve.base.arguments import positive
from banaserve_bench.results import result
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.router import decisions, proxy


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
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
    if given.only and given.json is not None and given.json.exists():
        record = joined(result.read(given.json), record)
    measurement.deliver(record)
    return 0


def joined(before: result.Result, now: result.Result) -> result.Result:
    """Return ``now``, which is one part, with the other part from ``before``.

    ``raw`` holds for each part when, with which code and how it was measured; the record's own
    fields describe the part that was measured last.
    """
    parts = dict(before.raw.get("parts") or {_part(before.figures): _provenance(before)})
    part = _part(now.figures)
    parts[part] = _provenance(now)
    others = [notes for name, one in parts.items() if name != part for notes in one["notes"]]
    kept = {name: one for name, one in before.figures.items() if _part([name]) != part}
    return structs.replace(
        now,
        figures={**now.figures, **kept},
        notes=[*now.notes, *others],
        raw={**before.raw, **now.raw, "parts": parts},
    )


def _part(names: Iterable[str]) -> str:
    is_pure = all(name.startswith(("decisions_per_s", "tree_")) for name in names)
    return "decisions" if is_pure else "proxy"


def _provenance(record: result.Result) -> dict[str, Any]:
    return {
        "commit": record.commit,
        "dirty": record.dirty,
        "started_at": record.started_at.isoformat(),
        "options": record.options,
        "notes": record.notes,
    }


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("router", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=5)
    add("--requests", type=positive, default=4000)
    add("--streams", type=positive, default=256)
    add("--rate", type=float, default=200.0, help="requests/s where latency is compared")
    add("--policy", default="cache_aware", help="of banaserve route")
    add("--peers", type=Path, metavar="FOLDER", help="install the other routers there and compare")
    add("--insertions", type=positive, default=10_000_000, help="into the bounded prefix tree")
    add(
        "--only",
        choices=("decisions", "proxy"),
        help="one part of the two; what the file of --json has of the other stays",
    )
    add("--seed", type=int, default=0)
    return parser.parse_args(list(argv))
