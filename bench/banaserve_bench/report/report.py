"""Report of the results in a folder as one page of Markdown: ``banaserve bench report DIR``.

Every figure with its 95% interval over the runs (Student's t), the best of each row marked; for
serving runs also the distributions of latency, and throughput and latency over the load. Plots need
matplotlib: pip install matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.report import plots, tables
from banaserve_bench.report.compare_tables import extra_tables
from banaserve_bench.report.plots import PlotGrid
from banaserve_bench.report.tables import Table
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from banaserve_bench.serving.summary import Summary

_SKIPPED = ("run.json",)
_NOTHING: tuple[object, ...] = (None, "None", [])


def make_parser() -> Parser:
    parser = Parser(prog="banaserve bench report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with results, at any depth")
    parser.add_argument("--out", type=Path, help="folder of the page (default: DIR)")
    parser.add_argument("--title", default="Benchmarks of banaserve")
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
    sections = [section_of(result.read(path)) for path in result_files(folder)]
    problem = "" if plots.is_possible() else plots.MISSING
    if problem:
        print(problem, file=sys.stderr)
    page = out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = [
            [] if problem else _drawn(section, out, number)
            for number, section in enumerate(sections, start=1)
        ]
        page.write_text(_markdown(title, sections, names, problem))
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


def _drawn(section: Section, out: Path, number: int) -> list[str]:
    """Write a section's plots as files; return their names from ``out``."""
    names = []
    for place, grid in enumerate(section.plots):
        names.append(f"plots/{number}-{place}.svg")
        (out / "plots").mkdir(exist_ok=True)
        (out / names[-1]).write_text(plots.svg(grid))
    return names


def _markdown(
    title: str, sections: Sequence[Section], plot_names: Sequence[Sequence[str]], problem: str
) -> str:
    """Return the page: of each result the figures, then the facts behind them."""
    parts = [f"# {title}"]
    if problem:
        parts.append(problem)
    for section, names in zip(sections, plot_names, strict=True):
        parts += _section(section, names)
    return "\n\n".join(parts) + "\n"


def _section(section: Section, plot_names: Sequence[str]) -> list[str]:
    parts = [f"## {section.name}"]
    if section.warnings:
        parts.append(_list(section.warnings))
    if not tables.is_empty(section.table):
        parts.append(tables.as_markdown(section.table))
    if section.table_note:
        parts.append(section.table_note)
    for grid, name in zip(section.plots, plot_names, strict=False):
        parts += [f"### {grid.title}", f"![{grid.title}]({name})"]
    for caption, table in section.more:
        parts += [f"### {caption}", tables.as_markdown(table)]
    parts += ["### What this rests on", "; ".join(section.facts)]
    if section.notes:
        parts.append(_list(section.notes))
    return parts


def _list(words: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in words)


@dataclass(frozen=True, slots=True)
class Section:
    """Section of one result; the first row of a table holds headings.

    Attributes:
        warnings: Sentences without which the figures mislead.
        table_note: Meaning of the marks in the table; empty if it has none.
        more: Further tables, each with a caption.
    """

    name: str
    warnings: list[str]
    facts: list[str]
    table: Table
    plots: list[PlotGrid]
    notes: list[str]
    table_note: str = ""
    more: list[tuple[str, Table]] = field(default_factory=list)


def section_of(record: Result) -> Section:
    """Return the section of a result.

    Raises:
        UserError: The record claims to be a serving run, but its cells are invalid.
    """
    systems = _systems(record)
    more = []
    if "systems" in record.raw:
        simulated = _cells(record, record.raw.get("simulated"))
        more = extra_tables(record.raw, systems, simulated)
    workload = record.options.get("workload")
    return Section(
        name=f"{record.name}: {workload}" if workload else record.name,
        warnings=_warnings(record),
        facts=facts_of(record),
        table=tables.serving_table(systems) if systems else tables.figure_table(record.figures),
        plots=plots.grids_of(systems, record.raw.get("timelines", {})),
        notes=record.notes,
        table_note=tables.MARKS if len(systems) > 1 else "",
        more=more,
    )


def _warnings(record: Result) -> list[str]:
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


def _systems(record: Result) -> dict[str, list[Summary]]:
    """Return the cells of a serving run or a comparison by system; empty for other results."""
    raw = record.raw.get("systems")
    if raw is None and "cells" in record.raw:
        raw = {record.options.get("system") or record.name: record.raw["cells"]}
    return _cells(record, raw)


def _cells(record: Result, raw: Any) -> dict[str, list[Summary]]:
    try:
        found = msgspec.convert(raw or {}, type=dict[str, list[Summary]])
    except msgspec.ValidationError as error:
        raise UserError(f"a result of {record.name} has cells that are none: {error}") from error
    return {name: cells for name, cells in found.items() if cells}
