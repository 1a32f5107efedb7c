"""A serving run as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from banaserve.bench.serving_summary import LATENCIES, Summary
from banaserve.bench.statistics import interval_text

_ROWS = (
    ("requests/s", "requests_per_s", 1.0),
    ("goodput, requests/s", "goodput_per_s", 1.0),
    ("output tokens/s", "output_tokens_per_s", 1.0),
    ("input + 2 output tokens/s", "weighted_tokens_per_s", 1.0),
    *(
        (f"{name.upper() if name != 'e2e' else name} {at}, ms", f"{name}_{at}", 1e3)
        for name in LATENCIES
        for at in ("mean", "p50", "p90", "p99")
    ),
    ("prompt tokens", "prompt_tokens_mean", 1.0),
    ("output tokens", "output_tokens_mean", 1.0),
    ("of the prompt cached", "cached_fraction", 1.0),
    ("sent late p99, ms", "send_delay_p99", 1e3),
    ("client, of a core", "client_cpu_fraction", 1.0),
)


def table(summaries: Sequence[Summary]) -> Table:
    """Returns a column for each load: means over seeds, with their 95% interval's half width."""
    by_load: dict[str, list[Summary]] = {}
    for summary in summaries:
        by_load.setdefault(summary.load_name, []).append(summary)
    shown = Table(title="mean over seeds, ± half the 95% interval", box=None)
    shown.add_column("")
    for load in by_load:
        shown.add_column(load, justify="right")
    for count in ("requests", "failed", "timed_out"):
        totals = (sum(getattr(one, count) for one in same) for same in by_load.values())
        shown.add_row(count.replace("_", " "), *map(str, totals))
    for name, metric, factor in _ROWS:
        cells = [
            _mean([one.metrics[metric] * factor for one in same if metric in one.metrics])
            for same in by_load.values()
        ]
        shown.add_row(name, *cells)
    return shown


def _mean(values: Sequence[float]) -> str:
    return interval_text(values) if values else "-"
