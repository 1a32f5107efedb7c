"""Plots of a serving run or a comparison: figures over the load, distributions, timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve_bench.report.serving_metrics import load_words, loads_of
from banaserve_bench.serving.summary import Summary
from banaserve_bench.serving.timeline import InstanceTimeline

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
    """

    name: str
    points: Sequence[Point]
    whiskers: Sequence[tuple[float, float]] = ()


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
