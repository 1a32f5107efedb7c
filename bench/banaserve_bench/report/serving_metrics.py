"""Figures of serving that a report shows, and which of two values is the better one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from banaserve_bench.serving.summary import Summary


class ServingMetric(NamedTuple):
    """A figure of a cell.

    Attributes:
        words: Name of the metric in a table.
        told: Name of the metric in a sentence; empty if it appears only in tables.
        key: Key in ``Summary.metrics``.
        factor: Factor from the value in ``Summary.metrics`` to ``unit``.
        is_more_better: True if the larger value is better.
        is_latency: True if it covers only successful requests, so that it flatters a system that
            lost many.
    """

    words: str
    told: str
    key: str
    factor: float
    unit: str
    is_more_better: bool
    is_latency: bool = False

    def heading(self) -> str:
        """Return the name of the metric with its unit."""
        return f"{self.words}, {self.unit}"


SERVING_METRICS = (
    ServingMetric("goodput", "requests in time", "goodput_per_s", 1.0, "requests/s", True),
    ServingMetric("output", "output tokens", "output_tokens_per_s", 1.0, "tokens/s", True),
    ServingMetric("requests", "", "requests_per_s", 1.0, "requests/s", True),
    ServingMetric("TTFT p50", "time to first token (p50)", "ttft_p50", 1e3, "ms", False, True),
    ServingMetric("TTFT p99", "time to first token (p99)", "ttft_p99", 1e3, "ms", False, True),
    ServingMetric("TPOT p50", "time per output token (p50)", "tpot_p50", 1e3, "ms", False, True),
    ServingMetric("TPOT p99", "", "tpot_p99", 1e3, "ms", False, True),
    ServingMetric("e2e p50", "whole requests (p50)", "e2e_p50", 1.0, "s", False, True),
    ServingMetric("prompt cached", "", "cached_fraction", 100.0, "%", True),
)
TOLD_METRICS = tuple(metric for metric in SERVING_METRICS if metric.told)


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
