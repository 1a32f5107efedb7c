"""Figures of the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

from benchmarks.elastic.runs import CellOutcome
from benchmarks.measurement import Samples

_GQA = "llama-3.1-8b-h100"
_LEAST = 0.01
"""Minimum goodput in ratios: a lower goodput counts as this value."""


def figures(outcomes: Sequence[CellOutcome]) -> Samples:
    """Return all figures, without those that no cell has."""
    found: Samples = {}
    for name, values in (
        ("regret", [regret(one) for one in outcomes]),
        ("total_regret", [total_regret(one) for one in outcomes]),
    ):
        found[name] = values, "fraction"
        found[f"{name}_max"] = [max(values)], "fraction"
        found[f"{name}_mean"] = [sum(values) / len(values)], "fraction"
    ratios = [_gain(one, _colocated(one, 2048)) for one in outcomes]
    found["colocated_ratio"] = ratios, "ratio"
    found["colocated_ratio_min"] = [min(ratios)], "ratio"
    for profile in dict.fromkeys(one.cell.profile for one in outcomes):
        own = [one for one in outcomes if one.cell.profile == profile]
        varying = [_over_fixed(one) for one in own if one.cell.is_varying]
        if varying:
            found[f"varying_gain.{profile}"] = [_geometric_mean(varying)], "ratio"
    apart = [one for one in outcomes if one.cell.profile == _GQA and not _all_reach_one(one)]
    if apart:
        tuned = [_gain(one, max(_colocated(one, c) for c in (512, 2048))) for one in apart]
        shipped = [_gain(one, _colocated(one, 2048)) for one in apart]
        found["split_gain"] = [_geometric_mean(tuned)], "ratio"
        found["split_gain_as_shipped"] = [_geometric_mean(shipped)], "ratio"
    for name in outcomes[0].elastic:
        if name != "elastic":
            parts = [_over_fixed(one, name) for one in outcomes]
            found[f"without.{name}"] = [_geometric_mean(parts)], "ratio"
            whole = [_gain(one, one.elastic["elastic"].goodput, name) for one in outcomes]
            found[f"without_over_whole.{name}"] = whole, "ratio"
    wholes = [_over_fixed(one) for one in outcomes]
    found["over_best_fixed"] = [_geometric_mean(wholes)], "ratio"
    found["best_fixed_ratio"] = wholes, "ratio"
    found["changes"] = [len(one.elastic["elastic"].changes_s) for one in outcomes], "changes"
    return found


def regret(one: CellOutcome) -> float:
    """Return the goodput that the best fixed arrangement in hindsight has more, at least 0."""
    return max(0.0, one.fixed[one.best].goodput - one.elastic["elastic"].goodput)


def total_regret(one: CellOutcome) -> float:
    """Return the additional total time over the best fixed arrangement, as a share, at least 0."""
    best = one.fixed[one.best].total_s
    return max(0.0, one.elastic["elastic"].total_s / best - 1)


def told(one: CellOutcome) -> str:
    """Return the outcome of a cell in a line: goodput, and time to the last token."""
    best, own = one.fixed[one.best], one.elastic["elastic"]
    return (
        f"{one.cell.name}, {one.num_requests} requests: elastic {own.goodput:.3f} in "
        f"{own.total_s:.0f} s with {len(own.changes_s)} changes, {one.best} {best.goodput:.3f} in "
        f"{best.total_s:.0f} s, colocated {_colocated(one, 512):.3f} with steps of 512 and "
        f"{_colocated(one, 2048):.3f} with 2048"
    )


def _colocated(one: CellOutcome, chunk: int) -> float:
    (found,) = (
        outcome
        for name, outcome in one.fixed.items()
        if name.startswith("0 prefill, 0 decode") and name.endswith(f"of {chunk}")
    )
    return found.goodput


def _over_fixed(one: CellOutcome, name: str = "elastic") -> float:
    return _gain(one, one.fixed[one.best].goodput, name)


def _gain(one: CellOutcome, over: float, name: str = "elastic") -> float:
    return max(one.elastic[name].goodput, _LEAST) / max(over, _LEAST)


def _all_reach_one(one: CellOutcome) -> bool:
    everyone = [*one.fixed.values(), *one.elastic.values()]
    return min(outcome.goodput for outcome in everyone) >= 0.995


def _geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(log(value) for value in values) / len(values))
