"""Report of the results in a folder as one page, HTML and Markdown: ``banaserve bench report DIR``.

Every figure with its 95% interval over the runs (Student's t), or its range where there are too
few; for serving runs the distributions of latency, and throughput and latency over the load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePath
from typing import Any

import msgspec

from banaserve.arguments import Parser
from banaserve.bench.report.compare_tables import Table, extra_tables
from banaserve.bench.report.plot import Plot, Series, style, svg
from banaserve.bench.results import result
from banaserve.bench.results.result import Figure, Result
from banaserve.bench.results.statistics import interval_text
from banaserve.bench.serving.summary import Summary
from banaserve.bench.serving.timeline import InstanceTimeline
from banaserve.errors import UserError

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "e2e": "end to end",
}
_OVER_LOAD = {
    "output_tokens_per_s": ("Throughput over the load", "output tokens/s", 1.0),
    "weighted_tokens_per_s": ("Input + 2 x output over the load", "tokens/s", 1.0),
    "ttft_p50": ("Median time to first token over the load", "ms", 1e3),
    "ttft_p99": ("p99 of the time to first token over the load", "ms", 1e3),
    "tpot_p50": ("Median time per output token over the load", "ms", 1e3),
}
_SERVING_COLUMNS = (
    ("requests/s", "requests_per_s", 1.0),
    ("output tokens/s", "output_tokens_per_s", 1.0),
    ("goodput /s", "goodput_per_s", 1.0),
    ("TTFT p50, ms", "ttft_p50", 1e3),
    ("TTFT p99, ms", "ttft_p99", 1e3),
    ("TPOT p50, ms", "tpot_p50", 1e3),
    ("TPOT p99, ms", "tpot_p99", 1e3),
    ("e2e p50, s", "e2e_p50", 1.0),
    ("cached", "cached_fraction", 1.0),
)
_CSS = (
    "body{font:15px/1.5 sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;"
    "background:#fff}table{border-collapse:collapse;margin:1rem 0;font-size:13px;display:block;"
    "overflow-x:auto}td,th{border:1px solid #bbb;padding:.2rem .5rem;text-align:right}"
    "td:first-child,th:first-child{text-align:left}.facts{color:#555;font-size:13px}"
    "@media screen and (prefers-color-scheme:dark){body{color:#ddd;background:#15181c}"
    "td,th{border-color:#555}.facts{color:#aaa}}"
    "@media print{figure,tr{break-inside:avoid}table{display:table;font-size:10px}}"
)


@dataclass(frozen=True, slots=True)
class Section:
    """One result: what it is, its table (the first row are headings) and its plots.

    Attributes:
        more: Further tables, each with a caption.
    """

    name: str
    facts: list[str]
    table: Table
    plots: list[Plot]
    notes: list[str]
    more: list[tuple[str, Table]] = field(default_factory=list)


def section_of(record: Result) -> Section:
    """Returns the section of a result.

    Raises:
        UserError: It says that it is a serving run, and its cells are not such.
    """
    systems = _systems(record)
    facts = [
        f"commit {record.commit[:9] if record.commit else 'unknown'}"
        + (" with changes" if record.dirty else ""),
        f"{record.machine.num_cores} x {record.machine.cpu_model}"
        + (f", {record.machine.gpu}" if record.machine.gpu else ""),
        f"vLLM {record.versions.vllm}, Python {record.versions.python}",
        f"seed {record.seed}",
        f"{record.started_at:%Y-%m-%d}",
        ", ".join(f"{name}={value}" for name, value in record.options.items() if value is not None),
        *_of_modelled_time(record),
    ]
    table = serving_table(systems) if systems else figure_table(record.figures)
    plots = [*load_plots(systems), *cdf_plots(systems)] if systems else []
    plots += timeline_plots(record.raw.get("timelines", {}))
    more = []
    if "systems" in record.raw:
        simulated = _cells(record, record.raw.get("simulated"))
        more = extra_tables(record.options, record.raw, systems, simulated)
    workload = record.options.get("workload")
    name = f"{record.name}: {workload}" if workload else record.name
    return Section(name, facts, table, plots, record.notes, more)


def _of_modelled_time(record: Result) -> list[str]:
    if not record.modelled_time:
        return []
    profiles = {f"{one.profile} ({one.source})" for one in record.modelled_time}
    dilations = sorted({f"{one.dilation:g}" for one in record.modelled_time})
    overran = [f"{one.num_overrun / max(1, one.num_steps):.1%}" for one in record.modelled_time]
    return [
        f"time is MODELLED, not measured: {', '.join(sorted(profiles))}",
        f"a modelled second took {' or '.join(dilations)} s; steps that overran, by server: "
        f"{', '.join(overran)}",
    ]


def _systems(record: Result) -> dict[str, list[Summary]]:
    """Returns the cells of a serving run or a comparison by system; empty for other results."""
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


def figure_table(figures: Mapping[str, Figure]) -> Table:
    """Returns a row for each figure."""
    rows = [["figure", "median", "min", "max", "mean ± 95%", "runs", "unit"]]
    for name, one in figures.items():
        numbers = [f"{value:.4g}" for value in (one.median, one.min, one.max)]
        rows.append([name, *numbers, interval_text(one.samples), str(len(one.samples)), one.unit])
    return rows


def _by_load(cells: Sequence[Summary]) -> dict[str, list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for cell in sorted(cells, key=lambda one: one.load or 0.0):
        found.setdefault(cell.load_name, []).append(cell)
    return found


def serving_table(systems: Mapping[str, Sequence[Summary]]) -> Table:
    """Returns a row for each system and load: means over seeds with their intervals."""
    rows = [["system", "load", "requests", "failed", *(name for name, _, _ in _SERVING_COLUMNS)]]
    for system, cells in systems.items():
        for load, same in _by_load(cells).items():
            counts = [str(sum(one.requests for one in same)), str(sum(one.failed for one in same))]
            values = []
            for _, metric, factor in _SERVING_COLUMNS:
                samples = [one.metrics[metric] for one in same if metric in one.metrics]
                values.append(interval_text(samples, factor) if samples else "-")
            rows.append([system, load, *counts, *values])
    return rows


def load_plots(systems: Mapping[str, Sequence[Summary]]) -> list[Plot]:
    """Returns metrics over the load, where there are at least two loads."""
    loads = {cell.load for cells in systems.values() for cell in cells if cell.load is not None}
    if len(loads) < 2:
        return []
    is_closed = any(cell.is_closed for cells in systems.values() for cell in cells)
    x_label = "requests under way" if is_closed else "requests/s asked"
    plots = []
    for metric, (title, unit, factor) in _OVER_LOAD.items():
        series = [_over_load(name, cells, metric, factor) for name, cells in systems.items()]
        if any(one.points for one in series):
            plots.append(Plot(title, x_label, unit, series))
    return plots


def _over_load(name: str, cells: Sequence[Summary], metric: str, factor: float) -> Series:
    points, whiskers = [], []
    for same in _by_load(cells).values():
        values = [one.metrics[metric] * factor for one in same if metric in one.metrics]
        if not values or same[0].load is None:
            continue
        points.append((same[0].load, sum(values) / len(values)))
        whiskers.append((min(values), max(values)))
    return Series(name, points, whiskers if any(low < high for low, high in whiskers) else ())


def cdf_plots(systems: Mapping[str, Sequence[Summary]]) -> list[Plot]:
    """Returns the distributions of latency at each load, all seeds together."""
    found: dict[str, dict[str, list[Summary]]] = {}
    for system, cells in systems.items():
        for load, same in _by_load(cells).items():
            found.setdefault(load, {})[system] = same
    plots = []
    for load, by_system in found.items():
        for latency, title in _LATENCIES.items():
            series = [
                Series(system, cdf([v * 1e3 for one in same for v in one.samples.get(latency, ())]))
                for system, same in by_system.items()
            ]
            if any(one.points for one in series):
                title_ = f"{title[0].upper()}{title[1:]} at {load.replace('_', ' ')}"
                share = "share of requests"
                plots.append(Plot(title_, "ms", share, series, x_log=True, marks=False))
    return plots


def timeline_plots(raw: Mapping[str, Any]) -> list[Plot]:
    """Returns for each system what its instances held over time, and how busy they were.

    Raises:
        UserError: Something else stands where timelines should.
    """
    try:
        timelines = msgspec.convert(raw, type=dict[str, InstanceTimeline])
    except msgspec.ValidationError as error:
        raise UserError(f"a result has timelines that are none: {error}") from error
    plots = []
    for system, one in timelines.items():
        held = {
            name: list(zip(one.at_s, seen, strict=True)) for name, seen in one.in_flight.items()
        }
        for title, unit, lines in (
            (f"Legs that each instance held: {system}", "legs under way", held),
            (f"Time in steps: {system}", "share of time", one.utilisation()),
        ):
            series = [Series(name, points) for name, points in lines.items() if points]
            if series:
                plots.append(Plot(title, "s", unit, series, marks=False))
    return plots


def cdf(values: Sequence[float], max_points: int = 200) -> list[tuple[float, float]]:
    """Returns the empirical distribution: at each value the share of values up to it."""
    ordered = sorted(values)
    step = -(-len(ordered) // max_points) or 1
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def as_html(title: str, sections: Sequence[Section]) -> str:
    """Returns a page that needs no other file."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        'content="light dark">',
        f"<title>{escape(title)}</title><style>{_CSS}{style()}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    for section in sections:
        parts.append(f"<section><h2>{escape(section.name)}</h2>")
        parts.append(f'<p class="facts">{escape("; ".join(section.facts))}</p>')
        parts.append(_html_table(section.table))
        for caption, table in section.more:
            parts.append(f"<h3>{escape(caption)}</h3>{_html_table(table)}")
        parts.append("</section>")
        parts += [f"<figure>{svg(plot, standalone=False)}</figure>" for plot in section.plots]
        if section.notes:
            items = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
            parts.append(f"<ul>{items}</ul>")
    parts.append("</body></html>\n")
    return "\n".join(parts)


def _html_table(table: Table) -> str:
    head, *rows = table
    parts = [f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
    parts += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return "\n".join((*parts, "</table>"))


def _markdown_table(table: Table) -> str:
    head, *rows = table
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def as_markdown(
    title: str, sections: Sequence[Section], plot_names: Sequence[Sequence[str]]
) -> str:
    """Returns the page, with the plots as files beside it."""
    parts = [f"# {title}"]
    for section, names in zip(sections, plot_names, strict=True):
        parts.append(f"## {section.name}")
        parts.append("; ".join(section.facts))
        parts.append(_markdown_table(section.table))
        for caption, table in section.more:
            parts += [f"### {caption}", _markdown_table(table)]
        parts += [
            f"![{plot.title}]({PurePath(name).as_posix()})"
            for plot, name in zip(section.plots, names, strict=True)
        ]
        if section.notes:
            parts.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join(parts) + "\n"


_SKIPPED = ("run.json",)


def main(argv: Sequence[str]) -> int:
    """Write both pages; the exit code."""
    parser = Parser(prog="banaserve bench report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with results, at any depth")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: DIR)")
    parser.add_argument("--title", default="Benchmarks of banaserve")
    given = parser.parse_args(list(argv))
    pages = write_report(given.folder, given.out or given.folder, given.title)
    for page in pages:
        print(page)
    return 0


def write_report(folder: Path, out: Path, title: str) -> list[Path]:
    """Writes report.html, report.md and its plots for all results below ``folder``.

    Raises:
        UserError: No folder, no result in it, a file that is no result, or no room to write.
    """
    sections = [section_of(result.read(path)) for path in result_files(folder)]
    html, markdown = out / "report.html", out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        html.write_text(as_html(title, sections))
        markdown.write_text(as_markdown(title, sections, _written(sections, out)))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return [html, markdown]


def result_files(folder: Path) -> list[Path]:
    """Returns the result files at any depth; of a serving run's folder only its result.

    Raises:
        UserError: There is no such folder, or nothing in it.
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


def _written(sections: Sequence[Section], out: Path) -> list[list[str]]:
    """Writes each section's plots as files; returns their names."""
    names = []
    for number, section in enumerate(sections, start=1):
        names.append([f"plots/{number}-{place}.svg" for place in range(len(section.plots))])
        for name, plot in zip(names[-1], section.plots, strict=True):
            (out / "plots").mkdir(exist_ok=True)
            (out / name).write_text(svg(plot) + "\n")
    return names
