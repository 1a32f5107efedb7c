"""Systems ranked by one figure at one load, and which of them lead. Pure.

A system leads alone if every other one differs from it: over several runs of the same requests, the
95% interval (Student's t) of the paired differences must not contain zero, and the lead must be at
least ``MIN_LEAD_FRACTION`` of the better value; after a single run, which has no spread, at least
``MIN_LEAD_OF_ONE_RUN_FRACTION``. Systems that do not differ from the best lead together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from banaserve.base.statistics import mean_interval
from banaserve_bench.report.serving_metrics import SERVING_METRICS, ServingMetric, loads_of
from banaserve_bench.serving.summary import Summary

MIN_LEAD_FRACTION = 0.01
MIN_LEAD_OF_ONE_RUN_FRACTION = 0.05


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

    @property
    def leader(self) -> str | None:
        """System that leads alone, among at least two; None if there is none."""
        is_alone = len(self.leaders) == 1 and len(self.means) > 1
        return self.leaders[0] if is_alone else None

    def ratio(self, system: str) -> float | None:
        """Return the system's value over the best one; None if the best one is zero."""
        best = next(iter(self.means.values()))
        return self.means[system] / best if best else None


def standings(
    systems: Mapping[str, Sequence[Summary]], metrics: Sequence[ServingMetric] = SERVING_METRICS
) -> list[Standing]:
    """Return a standing for each load and each metric that some system has, loads first."""
    found = []
    for load, by_system in loads_of(systems).items():
        fewest = min(_failed_fraction(cells) for cells in by_system.values())
        spoilt = [name for name, cells in by_system.items() if _failed_fraction(cells) > fewest]
        for metric in metrics:
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
