"""Figures of serving that a report shows, and the systems ranked by each of them. Pure.

A system leads alone if every other one differs from it: over several runs of the same requests, the
95% interval (Student's t) of the paired differences must not contain zero, and the lead must be at
least ``MIN_LEAD_FRACTION`` of the better value; after a single run, which has no spread, at least
``MIN_LEAD_OF_ONE_RUN_FRACTION``. Systems that do not differ from the best lead together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from banaserve_bench.results.statistics import mean_interval
from banaserve_bench.serving.summary import Summary

MIN_LEAD_FRACTION = 0.01
MIN_LEAD_OF_ONE_RUN_FRACTION = 0.05


class ServingMetric(NamedTuple):
    """A figure of a cell.

    Attributes:
        words: Name of the metric in a table.
        key: Key in ``Summary.metrics``.
        factor: Factor from the value in ``Summary.metrics`` to ``unit``.
        is_more_better: True if the larger value is better.
        is_latency: True if it covers only successful requests, so that it flatters a system that
            lost many.
    """

    words: str
    key: str
    factor: float
    unit: str
    is_more_better: bool
    is_latency: bool = False

    def heading(self) -> str:
        return f"{self.words}, {self.unit}"


SERVING_METRICS = (
    ServingMetric("goodput", "goodput_per_s", 1.0, "requests/s", True),
    ServingMetric("output", "output_tokens_per_s", 1.0, "tokens/s", True),
    ServingMetric("requests", "requests_per_s", 1.0, "requests/s", True),
    ServingMetric("TTFT p50", "ttft_p50", 1e3, "ms", False, True),
    ServingMetric("TTFT p99", "ttft_p99", 1e3, "ms", False, True),
    ServingMetric("TPOT p50", "tpot_p50", 1e3, "ms", False, True),
    ServingMetric("TPOT p99", "tpot_p99", 1e3, "ms", False, True),
    ServingMetric("e2e p50", "e2e_p50", 1.0, "s", False, True),
    ServingMetric("prompt cached", "cached_fraction", 100.0, "%", True),
)


def loads_of(systems: Mapping[str, Sequence[Summary]]) -> dict[str, dict[str, list[Summary]]]:
    """Return the cells by load and system: loads by size, systems in their order."""
    cells = [cell for same in systems.values() for cell in same]
    found: dict[str, dict[str, list[Summary]]] = {
        cell.load_name: {} for cell in sorted(cells, key=lambda one: one.load or 0.0)
    }
    for name, same in systems.items():
        for cell in same:
            found[cell.load_name].setdefault(name, []).append(cell)
    return found


def load_words(cell: Summary) -> str:
    """Return the load of a cell as a sentence ends with it."""
    if cell.load is None:
        return "the trace's own speed"
    return f"{cell.load:g} {'at once' if cell.is_closed else 'requests/s'}"


class Standing(NamedTuple):
    """Ranking of the systems by ``metric`` at ``load``.

    Attributes:
        load: Name of the load, as in ``Summary.load_name``.
        means: Mean by system, best first, in the metric's unit; without systems that lack this
            figure, or that lost more requests than others if it is a latency.
        leaders: The best system, and those that do not differ from it.
        others: Systems that have the figure but are not compared, since they lost more requests.
    """

    load: str
    metric: ServingMetric
    means: dict[str, float]
    leaders: list[str]
    others: list[str]


def standings(systems: Mapping[str, Sequence[Summary]]) -> list[Standing]:
    """Return a standing for each load and each metric that some system has, loads first."""
    found = []
    for load, by_system in loads_of(systems).items():
        fewest = min(_failed_fraction(cells) for cells in by_system.values())
        spoilt = [name for name, cells in by_system.items() if _failed_fraction(cells) > fewest]
        for metric in SERVING_METRICS:
            values = {name: _by_seed(cells, metric) for name, cells in by_system.items()}
            have = {name: one for name, one in values.items() if one}
            if not have:
                continue
            others = [name for name in have if metric.is_latency and name in spoilt]
            compared = {name: one for name, one in have.items() if name not in others}
            found.append(_standing(load, metric, compared, others))
    return found


def _standing(
    load: str,
    metric: ServingMetric,
    values: Mapping[str, Mapping[int, float]],
    others: list[str],
) -> Standing:
    means = {name: sum(one.values()) / len(one) for name, one in values.items()}
    ordered = sorted(means, key=lambda name: means[name], reverse=metric.is_more_better)
    leaders = ordered[:1]
    leaders += [one for one in ordered[1:] if not _is_apart(values[ordered[0]], values[one])]
    return Standing(load, metric, {n: means[n] for n in ordered}, leaders, others)


def _is_apart(best: Mapping[int, float], other: Mapping[int, float]) -> bool:
    seeds = [seed for seed in best if seed in other]
    differences = [other[seed] - best[seed] for seed in seeds]
    if not differences:
        return False
    size = abs(sum(best[seed] for seed in seeds))
    lead = abs(sum(differences)) / size if size else float(any(differences))
    if len(seeds) < 2:
        return lead >= MIN_LEAD_OF_ONE_RUN_FRACTION
    low, _, high = mean_interval(differences)
    return lead >= MIN_LEAD_FRACTION and not low <= 0 <= high


def _by_seed(cells: Sequence[Summary], metric: ServingMetric) -> dict[int, float]:
    return {
        cell.seed: cell.metrics[metric.key] * metric.factor
        for cell in cells
        if metric.key in cell.metrics
    }


def _failed_fraction(cells: Sequence[Summary]) -> float:
    return sum(cell.failed for cell in cells) / max(1, sum(cell.requests for cell in cells))
