"""Figures of the comparison, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, log

from rich.table import Table

from banaserve_bench.results.result import Figure, figure
from benchmarks.elastic.runs import CellOutcome

_GQA = "llama-3.1-8b-h100"
_LEAST = 0.01
"""Minimum goodput in ratios: a lower goodput counts as this value."""


def figures(outcomes: Sequence[CellOutcome]) -> dict[str, Figure]:
    """Return all figures, without those that no cell has."""
    found: dict[str, Figure] = {}
    regrets = [regret(one) for one in outcomes]
    totals = [total_regret(one) for one in outcomes]
    _add(found, "regret", "fraction", regrets)
    found["regret_max"] = figure([max(regrets)], "fraction")
    found["regret_mean"] = figure([sum(regrets) / len(regrets)], "fraction")
    _add(found, "total_regret", "fraction", totals)
    found["total_regret_max"] = figure([max(totals)], "fraction")
    found["total_regret_mean"] = figure([sum(totals) / len(totals)], "fraction")
    _add(found, "colocated_ratio", "ratio", [_over_colocated(one, 2048) for one in outcomes])
    ratios = [_over_colocated(one, 2048) for one in outcomes]
    found["colocated_ratio_min"] = figure([min(ratios)], "ratio")
    for profile in dict.fromkeys(one.cell.profile for one in outcomes):
        own = [one for one in outcomes if one.cell.profile == profile]
        varying = [_gain(one, one.fixed[one.best].goodput) for one in own if one.cell.is_varying]
        if varying:
            found[f"varying_gain.{profile}"] = figure([_geometric_mean(varying)], "ratio")
    apart = [one for one in outcomes if one.cell.profile == _GQA and not _all_reach_one(one)]
    if apart:
        tuned = [_gain(one, max(_colocated(one, c) for c in (512, 2048))) for one in apart]
        shipped = [_gain(one, _colocated(one, 2048)) for one in apart]
        found["split_gain"] = figure([_geometric_mean(tuned)], "ratio")
        found["split_gain_as_shipped"] = figure([_geometric_mean(shipped)], "ratio")
    for name in outcomes[0].elastic:
        if name != "elastic":
            parts = [_gain(one, one.fixed[one.best].goodput, name) for one in outcomes]
            found[f"without.{name}"] = figure([_geometric_mean(parts)], "ratio")
            whole = [_gain(one, one.elastic["elastic"].goodput, name) for one in outcomes]
            found[f"without_over_whole.{name}"] = figure(whole, "ratio")
    wholes = [_gain(one, one.fixed[one.best].goodput) for one in outcomes]
    found["over_best_fixed"] = figure([_geometric_mean(wholes)], "ratio")
    _add(found, "best_fixed_ratio", "ratio", wholes)
    _add(found, "changes", "changes", [len(one.elastic["elastic"].changes_s) for one in outcomes])
    return found


def regret(one: CellOutcome) -> float:
    """Return the goodput that the best fixed arrangement in hindsight has more, at least 0."""
    return max(0.0, one.fixed[one.best].goodput - one.elastic["elastic"].goodput)


def total_regret(one: CellOutcome) -> float:
    """Return the additional total time over the best fixed arrangement, as a share, at least 0."""
    best = one.fixed[one.best].total_s
    return max(0.0, one.elastic["elastic"].total_s / best - 1)


def table(outcomes: Iterable[CellOutcome]) -> Table:
    """Return a table with a row for each cell."""
    shown = Table(title="goodput, and time to the last token in seconds")
    for heading in ("cell", "requests", "best fixed", "", "colocated 512", "2048", "elastic", ""):
        shown.add_column(heading)
    for one in outcomes:
        best, own = one.fixed[one.best], one.elastic["elastic"]
        shown.add_row(
            one.cell.name,
            str(one.num_requests),
            one.best,
            f"{best.goodput:.3f} in {best.total_s:.0f}",
            f"{_colocated(one, 512):.3f}",
            f"{_colocated(one, 2048):.3f}",
            f"{own.goodput:.3f} in {own.total_s:.0f}",
            f"{len(own.changes_s)} changes",
        )
    return shown


def ablation_table(outcomes: Sequence[CellOutcome]) -> Table:
    """Return a table with a row for each part of the elastic system: results without the part."""
    shown = Table(title="without a part: goodput over that of the whole")
    for heading in ("without", "mean", "least", "most", "total time over the whole's"):
        shown.add_column(heading)
    for name in outcomes[0].elastic:
        ratios = [_gain(one, max(one.elastic["elastic"].goodput, _LEAST), name) for one in outcomes]
        times = [one.elastic[name].total_s / one.elastic["elastic"].total_s for one in outcomes]
        mean, longer = _geometric_mean(ratios), _geometric_mean(times)
        words = "nothing" if name == "elastic" else name
        shown.add_row(
            words, f"{mean:.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}", f"{longer:.3f}"
        )
    return shown


def _colocated(one: CellOutcome, chunk: int) -> float:
    (found,) = (
        outcome
        for name, outcome in one.fixed.items()
        if name.startswith("0 prefill, 0 decode") and name.endswith(f"of {chunk}")
    )
    return found.goodput


def _over_colocated(one: CellOutcome, chunk: int) -> float:
    return _gain(one, _colocated(one, chunk))


def _gain(one: CellOutcome, over: float, name: str = "elastic") -> float:
    return max(one.elastic[name].goodput, _LEAST) / max(over, _LEAST)


def _all_reach_one(one: CellOutcome) -> bool:
    everyone = [*one.fixed.values(), *one.elastic.values()]
    return min(outcome.goodput for outcome in everyone) >= 0.995


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))


def _add(found: dict[str, Figure], name: str, unit: str, values: Sequence[float]) -> None:
    found[name] = figure(list(values), unit)
