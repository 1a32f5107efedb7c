"""A plan as one page of HTML, which needs no network: the answer, pictures and their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve_bench.plan.page.curves import PlanCurves, find_curves, front
from banaserve_bench.plan.report import PlanReport
from banaserve_bench.plan.search.time_parts import TimeParts
from banaserve_bench.report import plots
from banaserve_bench.report.plots import DARK, LIGHT, Plot, PlotGrid, Series, Theme
from banaserve_bench.results.figure_text import number

_PARTS = ("wait", "prefill", "hand-over", "decode")
_CSP = "default-src 'none'; style-src 'unsafe-inline'"
Table = Iterable[Sequence[str]]


def write_page(report: PlanReport, path: Path, tell: Callable[[str], None]) -> None:
    """Simulate what the pictures need, and write the page.

    Raises:
        UserError: The file cannot be written.
    """
    _write(path, page(report, find_curves(report.asked, report.found, report.advice.offers, tell)))


def check_path(path: Path) -> None:
    """Check that the page can be written, before the work.

    Raises:
        UserError: It cannot.
    """
    _write(path, "", "a")


def _write(path: Path, text: str, mode: str = "w") -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


def page(report: PlanReport, curves: PlanCurves) -> str:
    title = f"Plan: {report.planned.name}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_style()}</style></head><body><main>",
            *_body(report, curves),
            "</main></body></html>",
        ]
    )


def _body(report: PlanReport, curves: PlanCurves) -> Iterator[str]:
    answer, _, reason = report.sentence.partition(": ")
    yield f"<h1>{escape(_upper(answer))}</h1><p class=answer>{escape(reason)}.</p>"
    yield f"<p>{escape(_upper(report.expected))}.</p>"
    yield f"<p>It starts with:</p><pre tabindex=0><code>{escape(report.command)}</code></pre>"
    yield _section("Systems that were judged", _table("Systems that were judged", report.rows()))
    unit = "GPU" if report.asked.device.kind else "instance"
    yield _picture(
        "What each system gives and takes", _front_plot(curves, unit), _placed(curves, unit)
    )
    yield _picture("Latency over the rate", _rate_plots(curves), _over_rate(curves))
    yield _section("Where the time of a request goes", _parts(curves))
    if estimates := report.estimates():
        items = "".join(f"<li>{escape(one)}</li>" for one in estimates)
        yield _section("Counter-offers and flip points", f"<ul>{items}</ul>")
    if report.advice.sensitivities:
        caption = "If the question were another one (estimates of one load)"
        yield _section("Sensitivities", _table(caption, report.sensitivity_rows()))
    facts = "".join(f"<li>{escape(one)}</li>" for one in report.facts())
    yield _section("What this rests on", f"<p>{escape(report.planned.about)}</p><ul>{facts}</ul>")


def _upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def _section(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def _picture(heading: str, grid: PlotGrid, table: Table) -> str:
    """Return a section with plots, and below them their figures as a table."""
    drawn = plots.svg(grid) if plots.is_possible() else f"<p>{escape(plots.MISSING)}</p>"
    figures = f"<details><summary>Figures of {escape(heading[:1].lower() + heading[1:])}</summary>"
    figures += f"{_table(heading, table)}</details>"
    return _section(heading, f"<figure>{drawn}</figure>{figures}")


def _front_plot(curves: PlanCurves, unit: str) -> PlotGrid:
    best = front(curves.placed)
    others = [one for one in curves.placed if one not in best]
    series = [
        Series("Pareto front", [(one.latency_s, one.per_gpu) for one in best]),
        Series("other systems", [(one.latency_s, one.per_gpu) for one in others], has_line=False),
    ]
    plot = Plot("Goodput and latency", "latency p99, s", f"in time, requests/s per {unit}", series)
    return PlotGrid("What each system gives and takes", [plot], num_columns=2)


def _placed(curves: PlanCurves, unit: str) -> Iterator[Sequence[str]]:
    best = front(curves.placed)
    yield ("system", "latency p99, s", f"in time, requests/s per {unit}", "on the Pareto front")
    for one in curves.placed:
        is_best = "yes" if one in best else "no"
        yield (one.name, number(one.latency_s, 3), number(one.per_gpu, 3), is_best)


def _rate_plots(curves: PlanCurves) -> PlotGrid:
    def series(place: int) -> list[Series]:
        return [
            Series(name, [(one.rate_per_s, 1e3 * one[place]) for one in points])
            for name, points in curves.over_rate.items()
        ]

    titles = ("Time to first token, p99", "Time per output token, p99")
    drawn = [Plot(title, "requests/s", "ms", series(n)) for n, title in enumerate(titles, start=1)]
    return PlotGrid("Latency over the rate", drawn, num_columns=2)


def _over_rate(curves: PlanCurves) -> Iterator[Sequence[str]]:
    yield ("system", "requests/s", "TTFT p99, ms", "TPOT p99, ms", "in time, %")
    for name, points in curves.over_rate.items():
        for one in points:
            rate, ttft, tpot, share = one
            values = (rate, 1e3 * ttft, 1e3 * tpot, 100 * share)
            yield (name, *(number(value, 3) for value in values))


def _parts(curves: PlanCurves) -> str:
    heading = ("system", *(f"{part}, ms" for part in _PARTS))
    rows = [
        (name, *(number(1e3 * one, 3) for one in parts)) for name, parts in curves.parts.items()
    ]
    bars = "".join(f"<p>{escape(name)}</p>{_bar(parts)}" for name, parts in curves.parts.items())
    keys = "".join(
        f"<span class=key><i class=part{n}></i>{part}</span>" for n, part in enumerate(_PARTS)
    )
    # The table says the same in words.
    picture = f"<div aria-hidden=true><p>{keys}</p>{bars}</div>"
    return picture + _table("Mean time of a request, by its parts", [heading, *rows])


def _bar(parts: TimeParts) -> str:
    total_s = sum(parts) or 1.0
    pieces = "".join(
        f'<i class=part{n} style="width:{100 * one / total_s:.1f}%"></i>'
        for n, one in enumerate(parts)
    )
    return f"<div class=bar>{pieces}</div>"


def _table(caption: str, rows: Table) -> str:
    heading, *others = rows
    head = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in heading)
    lines = "".join(
        f"<tr><th scope=row>{escape(first)}</th>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in others
    )
    return (
        f'<div class=wide tabindex=0 role=region aria-label="{escape(caption, quote=True)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{lines}</tbody></table></div>"
    )


def _style() -> str:
    return (
        f":root{{color-scheme:light dark;{_colours(LIGHT)}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{_colours(DARK)}}}}}"
        "body{margin:0;background:var(--back);color:var(--text);font:16px/1.5 sans-serif}"
        "main{max-width:62rem;margin:auto;padding:1rem}"
        "h1{font-size:2.4rem;margin:0}h2{font-size:1.2rem;margin-top:2rem}"
        ".answer{font-size:1.2rem}"
        "pre,.wide{overflow-x:auto}pre{border:1px solid var(--grid);padding:.6rem}"
        "table{border-collapse:collapse}caption{text-align:left;padding-bottom:.3rem}"
        "th,td{padding:.2rem .7rem;border-bottom:1px solid var(--grid);text-align:right}"
        "th:first-child{text-align:left;font-weight:normal}figure{margin:0}"
        "svg{max-width:100%;height:auto}.bar{display:flex;height:1.2rem}"
        ".key{margin-right:1rem}.key i{display:inline-block;width:.8rem;height:.8rem;"
        "margin-right:.3rem}"
        + "".join(f".part{n}{{background:var(--line{n})}}" for n in range(len(_PARTS)))
        + ":focus-visible{outline:3px solid var(--line0)}"
    )


def _colours(theme: Theme) -> str:
    lines = "".join(f"--line{n}:{one};" for n, one in enumerate(theme.lines[: len(_PARTS)]))
    return f"--back:{theme.background};--text:{theme.text};--grid:{theme.grid};{lines}"
