"""Plots drawn by matplotlib as SVG that can be read on white, on black and on paper.

matplotlib comes with the extra ``plots`` and is imported when something is drawn. It draws in the
colours of the light theme; a style sheet repaints each of them where the reader's screen is dark.
The background is drawn too, so that a page of the other theme around the picture does no harm.
Lines also differ in dashes and marks, for prints in grey.
"""

from __future__ import annotations

import hashlib
import io
import re
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from banaserve.base.figure_text import number
from banaserve_bench.report.plots import Plot, PlotGrid, Series

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
    legend_columns = max(1, min(len(names), int(width * columns / 1.9)))
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
        linestyle=_DASHES[place % len(_DASHES)],
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
