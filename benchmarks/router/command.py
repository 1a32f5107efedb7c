"""Cost of a router for a request, and of a policy's decision: ``python -m benchmarks router``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import structs

from banaserve.base.arguments import Parser, positive
from banaserve_bench.loadgen.servers import end_on_sigterm
from banaserve_bench.results import result
from benchmarks.router import decisions, proxy


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    given = _parse(argv)
    end_on_sigterm()
    started_at = datetime.now(UTC)
    figures: dict[str, result.Figure] = {}
    notes: list[str] = []
    raw: dict[str, object] = {}
    if given.only != "proxy":
        figures, notes, raw = decisions.figures(given.runs, given.seed, given.insertions)
    if given.only != "decisions":
        proxy_figures, proxy_notes = proxy.figures(_proxy_options(given))
        figures, notes = {**figures, **proxy_figures}, [*notes, *proxy_notes]
    asked = {
        key: value for key, value in vars(given).items() if key not in ("json", "seed", "peers")
    }
    record = result.result(
        "router",
        seed=given.seed,
        options={**asked, "peers": given.peers is not None},
        started_at=started_at,
        figures=figures,
        notes=notes,
        raw=raw,
    )
    if given.only and given.json is not None and given.json.exists():
        record = joined(result.read(given.json), record)
    result.deliver(record, given.json)
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
    parser = Parser(prog="python -m benchmarks router", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path)
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


def _proxy_options(given: argparse.Namespace) -> proxy.ProxyOptions:
    return proxy.ProxyOptions(
        given.runs,
        given.requests,
        given.streams,
        given.rate,
        given.policy,
        given.peers,
        given.seed,
    )
