"""Measures of the systems of a case, a sample for each seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from banaserve_bench.results.result import Figure, figure
from banaserve_route.sim.world import RegionSystem, RequestOutcome, simulate
from benchmarks.simulate_seeds.cases import PaperCase

MEASURES: dict[str, tuple[str, Callable[[RequestOutcome], float]]] = {
    "output": ("tokens/s", lambda one: one.output_tokens_per_s),
    "weighted": ("tokens/s", lambda one: one.weighted_tokens_per_s),
    "ttft mean": ("s", lambda one: one.mean_ttft_s),
    "ttft p50": ("s", lambda one: one.ttft_s(0.5)),
    "ttft p90": ("s", lambda one: one.ttft_s(0.9)),
    "ttft p95": ("s", lambda one: one.ttft_s(0.95)),
    "ttft p99": ("s", lambda one: one.ttft_s(0.99)),
    "e2e mean": ("s", lambda one: one.mean_e2e_s),
    "e2e p50": ("s", lambda one: one.e2e_s(0.5)),
    "e2e p95": ("s", lambda one: one.e2e_s(0.95)),
    "e2e p99": ("s", lambda one: one.e2e_s(0.99)),
    "hits": ("fraction", lambda one: one.hit_fraction),
    "most/least": (
        "ratio",
        lambda one: max(one.most_outstanding) / max(1, min(one.most_outstanding)),
    ),
    "open": ("requests", lambda one: float(one.num_censored)),
}


def figure_name(case: str, system: str, measure: str) -> str:
    """Return the name of a measure in a result."""
    return f"{case} | {system} | {measure}"


def run(case: PaperCase, data: Path, seeds: Sequence[int]) -> dict[str, Figure]:
    """Simulate every system of ``case``; return a figure of each measure, a sample a seed."""
    figures = {}
    for name, made in case.systems.items():
        system = made if isinstance(made, RegionSystem) else made(data)
        outcomes = [simulate(case.setting(data, seed), system, seed) for seed in seeds]
        for measure, (unit, value) in MEASURES.items():
            samples = [value(outcome) for outcome in outcomes]
            figures[figure_name(case.name, name, measure)] = figure(samples, unit)
    return figures
