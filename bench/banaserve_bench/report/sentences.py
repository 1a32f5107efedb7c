"""The answer of a result in sentences: which system leads where, by how much, and where it loses.

The sentences come from the same standings as the marks of the tables. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from banaserve.base.figure_text import number, row
from banaserve_bench.report.serving_metrics import TOLD_METRICS, load_words, loads_of
from banaserve_bench.report.standings import (
    MIN_LEAD_FRACTION,
    MIN_LEAD_OF_ONE_RUN_FRACTION,
    Standing,
    standings,
)
from banaserve_bench.results.result import Figure, Result
from banaserve_bench.serving.summary import Summary
from banaserve_bench.statistics import spread_fraction

Systems = Mapping[str, Sequence[Summary]]


def answer_of(record: Result, systems: Systems) -> list[str]:
    """Return the sentences of a result, the most important first.

    Args:
        systems: Cells of the result by system; empty if it is not a serving result.
    """
    found = [f"{note}." for note in record.notes if note.startswith("INCOMPLETE")]
    if record.modelled_time:
        profiles = ", ".join(sorted({one.profile for one in record.modelled_time}))
        found.append(f"All times and rates are those of a modelled GPU ({profiles}).")
    if len(systems) > 1:
        return [*found, *comparison(systems), *equal_answers(record.figures)]
    if systems:
        return [*found, *(of_one(cells) for cells in systems.values())]
    return [*found, *of_figures(record.figures)]


def comparison(systems: Systems) -> list[str]:
    """Return which system leads how often, where each system loses, and by which rule."""
    compared = _compared(systems)
    if not compared:
        score = "No figure is there of two systems, so that none can lead."
        return [score, *_failures(systems)]
    losses = [_losses(name, compared, _load_words(systems)) for name in systems]
    return [_score(compared, systems), *losses, *_failures(systems), _rule(systems)]


def _compared(systems: Systems) -> list[Standing]:
    return [one for one in standings(systems, TOLD_METRICS) if len(one.means) > 1]


def _load_words(systems: Systems) -> dict[str, str]:
    return {load: _words_of(by_system) for load, by_system in loads_of(systems).items()}


def _words_of(by_system: Mapping[str, Sequence[Summary]]) -> str:
    return load_words(next(iter(by_system.values()))[0])


def _score(compared: Sequence[Standing], systems: Systems) -> str:
    best = {name: sum(name in one.leaders for one in compared) for name in systems}
    alone = {name: sum(one.leader == name for one in compared) for name in systems}
    ordered = sorted(systems, key=lambda name: (-best[name], -alone[name]))
    metrics = len({one.metric for one in compared})
    loads = len({one.load for one in compared})
    told = ", ".join(f"{name} in {best[name]} (alone in {alone[name]})" for name in ordered)
    return (
        f"Best, or not told apart from the best, of {_count(len(compared), 'comparison')} "
        f"({_count(metrics, 'figure')} at {_count(loads, 'load')}): {told}."
    )


def _losses(name: str, compared: Sequence[Standing], loads: Mapping[str, str]) -> str:
    """Return in how many comparisons a system is behind, and where it is furthest behind."""
    mine = [one for one in compared if name in one.means]
    behind = [one for one in mine if name not in one.leaders]
    if not mine:
        return f"{name} has no figure that can be compared."
    if not behind:
        return f"{name} is behind in none of {_count(len(mine), 'comparison')}."
    worst = max(behind, key=lambda one: _distance(one, name))
    best = next(iter(worst.means))
    ratio = _over(worst.means[name], worst.means[best])
    return (
        f"{name} is behind in {len(behind)} of {_count(len(mine), 'comparison')}, furthest by "
        f"{worst.metric.told} at {loads[worst.load]}: {_valued(worst, name)} against "
        f"{_valued(worst, best)} of {best}{ratio}."
    )


def _distance(one: Standing, name: str) -> float:
    ratio = one.ratio(name)
    return abs(math.log(ratio)) if ratio is not None and ratio > 0 else math.inf


def _failures(systems: Systems) -> list[str]:
    """Return sentences on lost requests and on systems that are missing at a load."""
    found = []
    loads = _load_words(systems)
    for load, by_system in loads_of(systems).items():
        counts = {
            name: (sum(one.failed for one in cells), sum(one.requests for one in cells))
            for name, cells in by_system.items()
        }
        lost = [
            f"{name} lost {'all of its ' if failed == asked else f'{failed} of '}{asked} requests"
            for name, (failed, asked) in counts.items()
            if failed
        ]
        if lost:
            found.append(f"At {loads[load]} {_listed(lost)}.")
        absent = [name for name in systems if name not in by_system]
        if absent:
            found.append(f"At {loads[load]} there is nothing of {_listed(absent)}.")
    if not any("lost" in one for one in found):
        return [*found, "No request was lost."]
    return [*found, "Latencies of systems that lost more requests than others are not compared."]


def _rule(systems: Systems) -> str:
    counts = {
        len({cell.seed for cell in cells})
        for by_system in loads_of(systems).values()
        for cells in by_system.values()
    }
    if max(counts) < 2:
        return (
            "Each system ran once, and one run has no spread: differences below "
            f"{MIN_LEAD_OF_ONE_RUN_FRACTION:.0%} tell none apart."
        )
    runs = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return (
        f"Told apart is what {runs} runs bear out: the 95% interval of the differences, request "
        f"set by request set, is clear of zero, and they are {MIN_LEAD_FRACTION:.0%} at least."
    )


def equal_answers(figures: Mapping[str, Figure]) -> list[str]:
    """Return whether checked answers were those of one vLLM engine; empty if none was checked."""
    ending = ".equal_answers"
    shares = {
        name.removesuffix(ending): one.median
        for name, one in figures.items()
        if name.endswith(ending)
    }
    wrong = [f"{name} {1 - share:.0%}" for name, share in shares.items() if share < 1]
    if wrong:
        return [f"Checked answers that were not those of one vLLM engine: {_listed(wrong)}."]
    return ["All checked answers were those of one vLLM engine."] if shares else []


def of_one(cells: Sequence[Summary]) -> str:
    """Return the figures of a system at the highest requested load, as a sentence."""
    by_system = list(loads_of({"": cells}).values())[-1]
    same = by_system[""]
    told = []
    for metric in TOLD_METRICS:
        values = [
            one.metrics[metric.key] * metric.factor for one in same if metric.key in one.metrics
        ]
        if values:
            told.append(f"{metric.told} {number(sum(values) / len(values), 3)} {metric.unit}")
    failed, asked = sum(one.failed for one in same), sum(one.requests for one in same)
    figures = f"{', '.join(told)}; " if told else ""
    return f"At {load_words(same[0])}: {figures}{failed} of {asked} requests lost."


def of_figures(figures: Mapping[str, Figure]) -> list[str]:
    """Return how far the figures of a result can be trusted: its runs and their spread."""
    runs = {len(one.samples) for one in figures.values()}
    if not runs:
        return ["There is no figure."]
    if max(runs) < 2:
        return [f"{_count(len(figures), 'figure')} of one run, which has no spread."]
    spreads = {
        name: spread_fraction(one.samples)
        for name, one in figures.items()
        if len(one.samples) > 1 and one.median
    }
    told = str(min(runs)) if len(runs) == 1 else f"{min(runs)} to {max(runs)}"
    found = f"{_count(len(figures), 'figure')}, medians of {told} runs"
    if not spreads:
        return [f"{found}."]
    ordered = sorted(spreads.values())
    widest = max(spreads, key=lambda name: spreads[name])
    half = ordered[len(ordered) // 2]
    return [
        f"{found}; largest less smallest run is {half:.0%} of the median for half of them and "
        f"{spreads[widest]:.0%} at most ({widest})."
    ]


def _over(value: float, other: float) -> str:
    """Return a ratio as the end of a sentence; empty if the divisor is zero."""
    if not other:
        return ""
    ratio = value / other
    return f" ({f'{ratio:.2f}' if 0.1 <= abs(ratio) < 10 else number(ratio, 2)} times that)"


def _valued(one: Standing, name: str) -> str:
    shown = dict(zip(one.means, row(list(one.means.values())), strict=True))
    return f"{shown[name]} {one.metric.unit}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _listed(words: Iterable[str]) -> str:
    *before, last = words
    return f"{', '.join(before)} and {last}" if before else last
