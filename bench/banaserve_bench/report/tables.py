"""Tables of a report in Markdown, the best value of each row marked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from banaserve_bench.report.standings import (
    MIN_LEAD_FRACTION,
    MIN_LEAD_OF_ONE_RUN_FRACTION,
    SERVING_METRICS,
    ServingMetric,
    Standing,
    load_words,
    loads_of,
    standings,
)
from banaserve_bench.results.figure_text import (
    NO_VALUE,
    interval_text,
    number,
    row,
    scaled,
)
from banaserve_bench.results.result import Figure
from banaserve_bench.serving.summary import Summary

Table = list[list[str]]
LIKE_THE_BEST = "≈"
_LOADS = ("requests/s", "at once")
"""Endings of a load in words, which begins with a digit but is not a number."""
MARKS = (
    f"Bold: the best of its row; {LIKE_THE_BEST}: not told apart from it, since the 95% interval "
    "of the differences, request set by request set, contains zero or they are below "
    f"{MIN_LEAD_FRACTION:.0%} ({MIN_LEAD_OF_ONE_RUN_FRACTION:.0%} after one run, which has no "
    "spread); in brackets: not compared, since the system lost more requests than others."
)


class Best(str):
    """A cell that is the best of its row."""

    __slots__ = ()


def serving_table(systems: Mapping[str, Sequence[Summary]]) -> Table:
    """Return a row for each load and figure and a column for each system: means over seeds.

    A table of one system alone has a column for each load, and no marks.
    """
    if len(systems) == 1:
        [cells] = systems.values()
        return _of_one(cells)
    places = {(one.load, one.metric): one for one in standings(systems)}
    table = [["load", "figure", *systems]]
    for load, by_system in loads_of(systems).items():
        words = load_words(next(iter(by_system.values()))[0])
        for count in ("requests", "failed"):
            counts = [_total(by_system.get(name, ()), count) for name in systems]
            table.append([words, count, *counts])
        for metric in SERVING_METRICS:
            standing = places.get((load, metric))
            if standing is not None:
                table.append([words, metric.heading(), *_cells(standing, by_system, systems)])
    return table


def _of_one(cells: Sequence[Summary]) -> Table:
    loads = {load_words(one[""][0]): one[""] for one in loads_of({"": cells}).values()}
    table = [["figure", *loads]]
    table += [
        [count, *(_total(same, count) for same in loads.values())]
        for count in ("requests", "failed")
    ]
    for metric in SERVING_METRICS:
        shown = [interval_text(_samples(same, metric)) for same in loads.values()]
        if any(one != NO_VALUE for one in shown):
            table.append([metric.heading(), *shown])
    return table


def _total(cells: Sequence[Summary], count: str) -> str:
    return number(sum(getattr(one, count) for one in cells)) if cells else NO_VALUE


def _samples(cells: Sequence[Summary], metric: ServingMetric) -> list[float]:
    found = [one.metrics[metric.key] for one in cells if metric.key in one.metrics]
    return [value * metric.factor for value in found]


def _cells(
    standing: Standing, by_system: Mapping[str, Sequence[Summary]], systems: Iterable[str]
) -> list[str]:
    samples = {name: _samples(by_system.get(name, ()), standing.metric) for name in systems}
    texts = {name: interval_text(values) for name, values in samples.items()}
    single = {name: values[0] for name, values in samples.items() if len(values) == 1}
    texts |= zip(single, row(list(single.values())), strict=True)
    for name in standing.others:
        texts[name] = f"[{texts[name]}]"
    return [_marked(name, texts, standing) for name in systems]


def _marked(name: str, texts: Mapping[str, str], standing: Standing) -> str:
    compared = list(standing.means)
    if name not in compared or len({standing.means[one] for one in compared}) == 1:
        return texts[name]
    if standing.means[name] == standing.means[compared[0]]:
        return Best(texts[name])
    return f"{texts[name]} {LIKE_THE_BEST}" if name in standing.leaders else texts[name]


def figure_table(figures: Mapping[str, Figure]) -> Table:
    """Return a table with a row for each figure, in a unit of suitable size."""
    rows = [["figure", "median", "min", "max", "mean ± 95%", "runs", "unit"]]
    for name, one in figures.items():
        factor, unit = scaled(one.samples, one.unit)
        numbers = row([value * factor for value in (one.median, one.min, one.max)])
        mean = interval_text(one.samples, factor) if len(one.samples) > 1 else NO_VALUE
        rows.append([name, *numbers, mean, str(len(one.samples)), unit])
    return rows


def is_empty(table: Table) -> bool:
    """Return whether the table has headings at most."""
    return len(table) < 2


def number_columns(rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column of ``rows``, without headings, whether it holds only numbers."""
    return [all(_is_number(cell) for cell in column) for column in zip(*rows, strict=True)]


def _is_number(cell: str) -> bool:
    text = cell.lstrip("[-")
    return cell == NO_VALUE or (text[:1].isdigit() and not text.endswith(_LOADS))


def as_markdown(table: Table) -> str:
    """Return the table in GitHub's Markdown, numbers right-aligned and the best values bold.

    The columns of the source text are aligned too.
    """
    texts = [[_markdown_cell(cell) for cell in cells] for cells in table]
    are_numbers = number_columns(table[1:])
    widths = [max(3, *map(len, column)) for column in zip(*texts, strict=True)]
    rule = [
        "-" * (width - 1) + (":" if is_number else "-")
        for width, is_number in zip(widths, are_numbers, strict=True)
    ]
    lines = [
        [
            f"{text:>{width}}" if is_number else f"{text:<{width}}"
            for text, width, is_number in zip(cells, widths, are_numbers, strict=True)
        ]
        for cells in texts
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (lines[0], rule, *lines[1:]))


def _markdown_cell(cell: str) -> str:
    text = cell.replace("|", "\\|")
    return f"**{text}**" if isinstance(cell, Best) else text
