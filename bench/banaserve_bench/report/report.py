"""Report of the results in a folder as one page of Markdown.

Every figure with its 95% interval over the runs (Student's t), the best of each row marked; for
serving runs also the distributions of latency, and throughput and latency over the load. Plots need
matplotlib: pip install matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from banaserve.base.arguments import Formatter, Parser
from banaserve.base.errors import UserError
from banaserve_bench.report import plots, tables
from banaserve_bench.report.compare_tables import extra_tables
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from banaserve_bench.serving.summary import Summary

_SKIPPED = ("run.json",)
_NOTHING: tuple[object, ...] = (None, "None", [])


def make_parser() -> Parser:
    parser = Parser(
        prog="banaserve bench report",
        usage="banaserve bench report [options] DIR",
        description=__doc__,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with results, at any depth"
    )
    parser.add_argument("--out", type=Path, help="folder of the page (DIR)")
    parser.add_argument("--title", default="Benchmarks of banaserve", help="title of the page")
    return parser


def main(argv: Sequence[str]) -> int:
    given = make_parser().parse_args(list(argv))
    print(write_report(given.folder, given.out or given.folder, given.title))
    return 0


def write_report(folder: Path, out: Path, title: str) -> Path:
    """Write report.md and its plots for all results below ``folder``; return the page's path.

    Without matplotlib the plots are left out; the page and standard error say so.

    Raises:
        UserError: There is no folder, no result in it, a file that is not a result, or no room to
            write.
    """
    records = [result.read(path) for path in result_files(folder)]
    parts = [f"# {title}"]
    if not plots.is_possible():
        print(plots.MISSING, file=sys.stderr)
        parts.append(plots.MISSING)
    page = out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number, record in enumerate(records, start=1):
            parts += _section(record, out, number)
        page.write_text("\n\n".join(parts) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return page


def result_files(folder: Path) -> list[Path]:
    """Return the result files at any depth; of a serving run's folder only its result.

    Raises:
        UserError: There is no such folder, or it holds no result.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = [
        path
        for path in sorted(folder.rglob("*.json"))
        if path.name not in _SKIPPED and path.parent.name != "summaries"
    ]
    if not found:
        raise UserError(f"{folder} holds no results: write some there with bench NAME --json")
    return found


def _section(record: Result, out: Path, number: int) -> Iterator[str]:
    """Write the plots of a result; yield its figures, and then the facts behind them."""
    systems = systems_of(record)
    workload = record.options.get("workload")
    yield f"## {record.name}: {workload}" if workload else f"## {record.name}"
    if warnings := warnings_of(record):
        yield _list(warnings)
    table = tables.serving_table(systems) if systems else tables.figure_table(record.figures)
    if not tables.is_empty(table):
        yield tables.as_markdown(table)
    if len(systems) > 1:
        yield tables.MARKS
    if plots.is_possible():
        for place, grid in enumerate(plots.grids_of(systems, record.raw.get("timelines", {}))):
            name = f"plots/{number}-{place}.svg"
            (out / "plots").mkdir(exist_ok=True)
            (out / name).write_text(plots.svg(grid))
            yield f"### {grid.title}\n\n![{grid.title}]({name})"
    if "systems" in record.raw:
        for caption, more in extra_tables(record.raw, systems, systems_of(record, "simulated")):
            yield f"### {caption}\n\n{tables.as_markdown(more)}"
    yield f"### What this rests on\n\n{'; '.join(facts_of(record))}"
    if record.notes:
        yield _list(record.notes)


def _list(words: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in words)


def warnings_of(record: Result) -> list[str]:
    """Return sentences without which the figures mislead."""
    found = [f"{note}." for note in record.notes if note.startswith("INCOMPLETE")]
    if record.modelled_time:
        profiles = ", ".join(sorted({one.profile for one in record.modelled_time}))
        found.append(f"All times and rates are those of a modelled GPU ({profiles}).")
    return found


def facts_of(record: Result) -> list[str]:
    """Return what a result rests on: code, machine, versions, options and kind of time."""
    return [
        f"commit {record.commit[:9] if record.commit else 'unknown'}"
        + (" with changes" if record.dirty else ""),
        f"{record.machine.num_cores} x {record.machine.cpu_model}"
        + (f", {record.machine.gpu}" if record.machine.gpu else ""),
        f"vLLM {record.versions.vllm}, Python {record.versions.python}",
        f"seed {record.seed}",
        f"{record.started_at:%Y-%m-%d}",
        ", ".join(f"{name}={one}" for name, one in record.options.items() if one not in _NOTHING),
        *_of_modelled_time(record),
    ]


def _of_modelled_time(record: Result) -> list[str]:
    if not record.modelled_time:
        return []
    profiles = {f"{one.words}, {one.source}" for one in record.modelled_time}
    dilations = sorted({f"{one.dilation:g}" for one in record.modelled_time})
    overran = [f"{one.overrun_fraction:.1%}" for one in record.modelled_time]
    return [
        f"time is MODELLED, not measured: {', '.join(sorted(profiles))}",
        f"a modelled second took {' or '.join(dilations)} s; steps that overran, by server: "
        f"{', '.join(overran)}",
    ]


def systems_of(record: Result, kind: str = "systems") -> dict[str, list[Summary]]:
    """Return the cells of a serving run or a comparison by system; empty for other results.

    Args:
        kind: ``systems``, or ``simulated`` for the simulator's cells of a comparison.

    Raises:
        UserError: The cells are invalid.
    """
    raw = record.raw.get(kind)
    if raw is None and kind == "systems" and "cells" in record.raw:
        raw = {record.options.get("system") or record.name: record.raw["cells"]}
    try:
        found = msgspec.convert(raw or {}, type=dict[str, list[Summary]])
    except msgspec.ValidationError as error:
        raise UserError(f"a result of {record.name} has cells that are none: {error}") from error
    return {name: cells for name, cells in found.items() if cells}
