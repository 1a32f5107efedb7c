"""Plots of a serving run or a comparison, drawn by matplotlib as SVG.

Figures over the load, distributions and timelines. matplotlib is imported when something is drawn.
It draws in the colours of the light theme; a style sheet repaints each of them where the reader's
screen is dark. The background is drawn too, so that a page of the other theme around the picture
does no harm. Lines also differ in dashes and marks, for prints in grey.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from banaserve.base.errors import UserError
from banaserve_bench.report.standings import load_words, loads_of
from banaserve_bench.results.figure_text import number
from banaserve_bench.serving.summary import Summary
from banaserve_bench.serving.timeline import InstanceTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSING = "plots are left out, the package matplotlib is missing: pip install matplotlib"


class Theme(NamedTuple):
    """Colours as ``#rrggbb``; line colours in the order of their assignment."""

    background: str
    text: str
    grid: str
    lines: tuple[str, ...]


LIGHT = Theme(
    "#ffffff",
    "#222222",
    "#d4d4d4",
    ("#0b5fa5", "#b3400e", "#19743b", "#7a3fa0", "#8a6d00", "#a3195b", "#3f4f5f", "#006d77"),
)
DARK = Theme(
    "#15181c",
    "#dddddd",
    "#44484d",
    ("#6cb6ff", "#ffa06b", "#6fd695", "#cfa2f0", "#e3c34d", "#ff8dbb", "#b9c4cf", "#5fd0d8"),
)
_DASHES: tuple[Any, ...] = (
    "-",
    "--",
    ":",
    "-.",
    (0, (8, 2)),
    (0, (3, 1)),
    (0, (1, 1)),
    (0, (6, 1, 1, 1)),
)
_MARKS = "osD^vPX*"
_PANEL_IN = (3.3, 2.5)
_TWO_PANELS_IN = (4.9, 2.2)
_LEGEND_ROW_IN = 0.24
_LEGEND_MARK_IN = 0.8
_LEGEND_CHAR_IN = 0.065
Point = tuple[float, float]

_LATENCIES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2e": "End to end",
}
_OVER_LOAD = {
    "goodput_per_s": ("Requests in time", "requests/s", 1.0),
    "output_tokens_per_s": ("Output tokens", "tokens/s", 1.0),
    "weighted_tokens_per_s": ("Input + 2 x output", "tokens/s", 1.0),
    "ttft_p50": ("Time to first token, p50", "ms", 1e3),
    "ttft_p99": ("Time to first token, p99", "ms", 1e3),
    "tpot_p50": ("Time per output token, p50", "ms", 1e3),
}


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a plot.

    Attributes:
        whiskers: Lower and upper end of each point's whisker; empty if there are none.
        has_line: True if a line joins the points.
    """

    name: str
    points: Sequence[Point]
    whiskers: Sequence[tuple[float, float]] = ()
    has_line: bool = True


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot with one pair of axes.

    Attributes:
        marks: True if points get a mark, which suits few points but not distributions.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    marks: bool = True


@dataclass(frozen=True, slots=True)
class PlotGrid:
    """Plots beside each other, in rows of ``num_columns``, under one legend."""

    title: str
    plots: Sequence[Plot]
    num_columns: int = 3


def grids_of(
    systems: Mapping[str, Sequence[Summary]], timelines: Mapping[str, Any]
) -> list[PlotGrid]:
    """Return the plots that a result's cells and timelines allow, in grids.

    Raises:
        UserError: ``timelines`` holds something else than timelines.
    """
    found = [
        PlotGrid("Over the load", load_plots(systems)),
        PlotGrid("Distributions over requests", cdf_plots(systems)),
        PlotGrid("Instances over time", timeline_plots(timelines), num_columns=2),
    ]
    return [grid for grid in found if grid.plots]


def load_plots(systems: Mapping[str, Sequence[Summary]]) -> list[Plot]:
    """Return plots of figures over the load; empty with fewer than two loads."""
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
    for by_system in loads_of({name: cells}).values():
        same = by_system[name]
        values = [one.metrics[metric] * factor for one in same if metric in one.metrics]
        if not values or same[0].load is None:
            continue
        points.append((same[0].load, sum(values) / len(values)))
        whiskers.append((min(values), max(values)))
    return Series(name, points, whiskers if any(low < high for low, high in whiskers) else ())


def cdf_plots(systems: Mapping[str, Sequence[Summary]]) -> list[Plot]:
    """Return plots of the latency distributions at each load, all seeds together."""
    plots = []
    for by_system in loads_of(systems).values():
        load = load_words(next(iter(by_system.values()))[0])
        for latency, title in _LATENCIES.items():
            series = [
                Series(system, cdf([v * 1e3 for one in same for v in one.samples.get(latency, ())]))
                for system, same in by_system.items()
            ]
            if any(one.points for one in series):
                share = "share of requests"
                title_ = f"{title} at {load}"
                plots.append(Plot(title_, "ms", share, series, x_log=True, marks=False))
    return plots


def timeline_plots(raw: Mapping[str, Any]) -> list[Plot]:
    """Return for each system plots of the legs that its instances held and of their busy time.

    Raises:
        UserError: ``raw`` holds something else than timelines.
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
            (f"Legs held: {system}", "legs under way", held),
            (f"Time in steps: {system}", "share of time", one.utilisation()),
        ):
            series = [Series(name, points) for name, points in lines.items() if points]
            if series:
                plots.append(Plot(title, "s", unit, series, marks=False))
    return plots


def cdf(values: Sequence[float], max_points: int = 100) -> list[Point]:
    """Return the empirical distribution: at each value the share of values up to it."""
    ordered = sorted(values)
    step = -(-len(ordered) // max_points) or 1
    places = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[place], (place + 1) / len(ordered)) for place in places]


def is_possible() -> bool:
    """Return whether matplotlib is installed; ``MISSING`` says what to do if it is not."""
    return find_spec("matplotlib") is not None


def svg(grid: PlotGrid) -> str:
    """Return the plots as one SVG document, equal for equal plots.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    with matplotlib.rc_context(settings(repr(grid))):
        return _document(grid)


def settings(content: str) -> dict[str, Any]:
    """Return matplotlib's settings for a drawing in the light theme.

    Args:
        content: Content of the drawing, from which identifiers are derived.
    """
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": hashlib.sha256(content.encode()).hexdigest(),
        "font.family": "sans-serif",
        "font.size": 8.5,
        "text.color": LIGHT.text,
        "axes.edgecolor": LIGHT.text,
        "axes.labelcolor": LIGHT.text,
        "axes.titlesize": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": LIGHT.text,
        "ytick.color": LIGHT.text,
        "grid.color": LIGHT.grid,
        "grid.linewidth": 0.6,
    }


def _document(grid: PlotGrid) -> str:
    from matplotlib.figure import Figure

    columns = min(grid.num_columns, len(grid.plots))
    rows = -(-len(grid.plots) // columns)
    names = list(dict.fromkeys(one.name for plot in grid.plots for one in _drawn(plot)))
    width, height = _TWO_PANELS_IN if grid.num_columns < 3 else _PANEL_IN
    entry_in = _LEGEND_MARK_IN + _LEGEND_CHAR_IN * max(map(len, names), default=0)
    legend_columns = max(1, min(len(names), int(width * columns / entry_in)))
    legend_rows = -(-len(names) // legend_columns)
    size = (width * columns, height * rows + _LEGEND_ROW_IN * legend_rows)
    figure = Figure(figsize=size, layout="constrained", facecolor=LIGHT.background)
    handles: dict[str, Any] = {}
    for place, plot in enumerate(grid.plots, start=1):
        axes = figure.add_subplot(rows, columns, place, facecolor=LIGHT.background)
        _frame(axes, plot)
        for one in _drawn(plot):
            handles[one.name] = _line(axes, one, names.index(one.name), plot.marks)
        _limits(axes, plot)
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside upper left",
        ncols=legend_columns,
        frameon=False,
        handlelength=3.2,
    )
    titles = ", ".join(plot.title for plot in grid.plots)
    return document(figure, f"{grid.title}: {titles}")


def document(figure: Figure, words: str) -> str:
    """Return a figure that was made with ``settings`` as SVG for light and dark screens.

    Args:
        words: Description of the figure, for readers who do not see it.
    """
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    return _styled(file.getvalue(), words)


def _drawn(plot: Plot) -> list[Series]:
    return [one for one in plot.series if one.points]


def _frame(axes: Axes, plot: Plot) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(plot.title, loc="left", fontweight="bold")
    axes.set_xlabel(plot.x_label)
    axes.set_ylabel(plot.y_label)
    axes.grid(True)
    axes.set_axisbelow(True)
    plain = FuncFormatter(lambda value, _: number(value))
    axes.yaxis.set_major_formatter(plain)
    positive = [x for one in plot.series for x, _ in one.points if x > 0]
    if plot.x_log and positive:
        is_wide = max(positive) / min(positive) > 100
        axes.set_xscale("log", nonpositive="clip")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(plain)


def _line(axes: Axes, one: Series, place: int, marks: bool) -> Any:
    xs, ys = zip(*one.points, strict=True)
    colour = LIGHT.lines[place % len(LIGHT.lines)]
    [line] = axes.plot(
        xs,
        ys,
        color=colour,
        linestyle=_DASHES[place % len(_DASHES)] if one.has_line else "",
        linewidth=1.6,
        marker=_MARKS[place % len(_MARKS)] if marks else "",
        markersize=4,
    )
    if one.whiskers:
        down = [max(0.0, y - low) for y, (low, _) in zip(ys, one.whiskers, strict=True)]
        up = [max(0.0, high - y) for y, (_, high) in zip(ys, one.whiskers, strict=True)]
        axes.errorbar(xs, ys, [down, up], fmt="none", color=colour, elinewidth=1, capsize=3)
    return line


def _limits(axes: Axes, plot: Plot) -> None:
    ys = [y for one in plot.series for _, y in one.points]
    ys += [low for one in plot.series for low, _ in one.whiskers]
    if ys and min(ys) >= 0:
        axes.set_ylim(bottom=0)


def style() -> str:
    """Return the CSS that repaints the light theme's colours where the screen is dark."""
    # Selectors name no ancestor: elements that are drawn by reference have none.
    pairs = zip(_colours(LIGHT), _colours(DARK), strict=True)
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in pairs
        for what in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"


def _colours(theme: Theme) -> tuple[str, ...]:
    return (theme.background, theme.text, theme.grid, *theme.lines)


def _styled(document: str, title: str) -> str:
    """Return the document without links and unused ids, with its style and its description."""
    start = document.index("<svg")
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", document[start:], flags=re.DOTALL)
    # Ids of groups: nothing refers to them, and they are the same in every document.
    body = re.sub(r' id="[\w.]+_\d+"', "", body)
    # The background of a pattern has its colour as an attribute, which the style does not match.
    body = re.sub(r'(fill|stroke)="(#[0-9a-f]{6})"', r'style="\1: \2"', body)
    label = escape(title, quote=True)
    head, end, rest = body.partition(">")
    head = head.replace("<svg", f'<svg class="plot" role="img" aria-label="{label}"', 1)
    # A hundredth of a point is finer than a screen shows.
    rest = re.sub(r"(\d+\.\d\d)\d+", r"\1", rest)
    return f"{head}{end}\n<style>{style()}</style>{rest}"
