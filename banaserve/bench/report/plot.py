"""Line plots as SVG that can be read on white, on black and on paper.

Colours follow the reader's scheme; lines differ in their dashes too, so that grey prints work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

_WIDTH, _HEIGHT = 640, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 48
_LEGEND_ROW = 18
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "1 2", "9 2 2 2 2 2")
_LIGHT = ("#0b5fa5", "#b3400e", "#19743b", "#7a3fa0", "#8a6d00", "#a3195b", "#3f4f5f", "#006d77")
_DARK = ("#6cb6ff", "#ffa06b", "#6fd695", "#cfa2f0", "#e3c34d", "#ff8dbb", "#b9c4cf", "#5fd0d8")


@dataclass(frozen=True, slots=True)
class Series:
    """A line.

    Attributes:
        whiskers: Of each point, from and to; empty where there are none.
    """

    name: str
    points: Sequence[Point]
    whiskers: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """What to draw.

    Attributes:
        marks: Whether points get a dot: for few points, not for distributions.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_log: bool = False
    y_log: bool = False
    marks: bool = True


def style() -> str:
    """Returns the CSS of the plots, for their file or for the page around them."""

    def lines(colours: Sequence[str]) -> str:
        return "".join(
            f".s{n}{{stroke:{colour}}}.m{n}{{fill:{colour}}}" for n, colour in enumerate(colours)
        )

    dashes = "".join(f".s{n}{{stroke-dasharray:{dash}}}" for n, dash in enumerate(_DASHES) if dash)
    return (
        ".plot{font:12px sans-serif;max-width:100%;height:auto}"
        ".plot text{fill:#222}.plot .axis{stroke:#555;fill:none}"
        ".plot .grid{stroke:#ccc;stroke-width:.5}"
        ".plot .line{fill:none;stroke-width:2}.plot .whisker{stroke-width:1.2;fill:none}"
        f"{lines(_LIGHT)}{dashes}"
        "@media screen and (prefers-color-scheme:dark){.plot text{fill:#ddd}"
        f".plot .axis{{stroke:#aaa}}.plot .grid{{stroke:#444}}{lines(_DARK)}}}"
    )


def svg(plot: Plot, standalone: bool = True) -> str:
    """Returns the plot as an SVG element; with its style where it stands alone."""
    drawn = [one for one in plot.series if one.points]
    rows = len(drawn)
    height = _HEIGHT + rows * _LEGEND_ROW
    axes = _Axes(plot, drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="plot" role="img" '
        f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'aria-label="{escape(plot.title, quote=True)}">'
    ]
    if standalone:
        parts.append(f"<style>{style()}</style>")
    parts.append(f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(plot.title)}</text>')
    parts += axes.drawn()
    for number, one in enumerate(drawn):
        parts += _line(axes, one, number % len(_LIGHT), plot.marks)
        y = _HEIGHT + number * _LEGEND_ROW + 6
        parts.append(f'<path class="line s{number % 8}" d="M{_LEFT} {y}h40"/>')
        parts.append(f'<text x="{_LEFT + 48}" y="{y + 4}">{escape(one.name)}</text>')
    parts.append("</svg>")
    return "\n".join(parts)


def _line(axes: _Axes, one: Series, number: int, marks: bool) -> list[str]:
    placed = [(axes.x(x), axes.y(y)) for x, y in one.points]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    parts = [f'<path class="line s{number}" d="M{path}"/>']
    for (x, _), (low, high) in zip(placed, one.whiskers, strict=False):
        top, bottom = axes.y(high), axes.y(low)
        cap = f"M{x - 4:.1f} {top:.1f}h8M{x:.1f} {top:.1f}V{bottom:.1f}M{x - 4:.1f} {bottom:.1f}h8"
        parts.append(f'<path class="whisker s{number}" stroke-dasharray="none" d="{cap}"/>')
    if marks:
        parts += [f'<circle class="m{number}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in placed]
    return parts


class _Axes:
    """Maps values to places and draws the frame."""

    def __init__(self, plot: Plot, drawn: Sequence[Series]) -> None:
        self._plot = plot
        xs = [x for one in drawn for x, _ in one.points]
        ys = [y for one in drawn for _, y in one.points]
        ys += [end for one in drawn for whisker in one.whiskers for end in whisker]
        self._x_ticks = _ticks(xs, plot.x_log, from_zero=False)
        self._y_ticks = _ticks(ys, plot.y_log, from_zero=True)

    def x(self, value: float) -> float:
        return _LEFT + _share(value, self._x_ticks, self._plot.x_log) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        share = _share(value, self._y_ticks, self._plot.y_log)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    def drawn(self) -> list[str]:
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for tick in self._y_ticks:
            y = self.y(tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
        for tick in self._x_ticks:
            x = self.x(tick)
            parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
            )
        parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
        middle = (_LEFT + right) / 2
        label = escape(self._plot.x_label)
        parts.append(f'<text x="{middle}" y="{bottom + 34}" text-anchor="middle">{label}</text>')
        y = (_TOP + bottom) / 2
        parts.append(
            f'<text transform="translate(14 {y}) rotate(-90)" text-anchor="middle">'
            f"{escape(self._plot.y_label)}</text>"
        )
        return parts


def _share(value: float, ticks: Sequence[float], is_log: bool) -> float:
    low, high = ticks[0], ticks[-1]
    if is_log:
        value, low, high = (math.log(max(one, ticks[0])) for one in (value, low, high))
    return (value - low) / (high - low)


def _ticks(values: Sequence[float], is_log: bool, from_zero: bool) -> list[float]:
    """Returns round values around all of ``values``, at least two."""
    if is_log:
        positive = [value for value in values if value > 0] or [1.0]
        first = math.floor(math.log10(min(positive)))
        last = max(first + 1, math.ceil(math.log10(max(positive))))
        return [10.0**power for power in range(first, last + 1)]
    low = min(0.0, *values) if from_zero and values else min(values, default=0.0)
    high = max(values, default=1.0)
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


def _round_step(raw: float) -> float:
    size = 10.0 ** math.floor(math.log10(raw))
    return next(factor * size for factor in (1, 2, 2.5, 5, 10) if factor * size >= raw * 0.999)
