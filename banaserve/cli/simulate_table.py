"""Rows of the tables that ``banaserve simulate`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banaserve.bench.results.statistics import mean_interval
from banaserve.costs import profile as profiles
from banaserve.sim import case as cases
from banaserve.sim.lengths import DATASETS
from banaserve.sim.system import KINDS

Row = tuple[str, ...]

_SHOWN = (
    ("finished", "finished_fraction", 100.0, "%"),
    ("goodput", "goodput_fraction", 100.0, "%"),
    ("requests/s", "requests_per_s", 1.0, ""),
    ("tokens/s", "output_tokens_per_s", 1.0, ""),
    ("total", "total_s", 1.0, " s"),
    ("mean latency", "e2e_mean_s", 1.0, " s"),
    ("ttft p50", "ttft_p50_s", 1e3, " ms"),
    ("ttft p99", "ttft_p99_s", 1e3, " ms"),
    ("tpot p50", "tpot_p50_s", 1e3, " ms"),
    ("tpot p99", "tpot_p99_s", 1e3, " ms"),
    ("busy", "busy_fraction", 100.0, "%"),
    ("cache hits", "cache_hit_fraction", 100.0, "%"),
    ("preemptions", "num_preemptions", 1.0, ""),
    ("refused", "num_refused", 1.0, ""),
    ("moves", "num_moves", 1.0, ""),
)

_MOST_MOVES = 20
"""Moves that are shown of each system; JSON has all."""


def result_rows(outcomes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row for each figure and a column for each system: means, with 95% intervals over seeds."""
    systems = list(outcomes[0]["systems"])
    rows: list[Row] = [("", *systems)]
    for words, key, factor, unit in _SHOWN:
        cells = []
        for system in systems:
            values = [factor * outcome["systems"][system][key] for outcome in outcomes]
            cells.append(_cell(values) + unit)
        rows.append((words, *cells))
    return rows


def _cell(values: Sequence[float]) -> str:
    if max(values) == min(values):
        return _number(values[0])
    low, mean, high = mean_interval(values)
    return f"{_number(mean)} ± {_number((high - low) / 2, 2)}"


def _number(value: float, digits: int = 4) -> str:
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def move_rows(outcome: Mapping[str, Any]) -> list[Row]:
    """What was moved in the first run, and when; nothing where nothing was."""
    rows: list[Row] = []
    for name, result in outcome["systems"].items():
        steps = result["steps"]
        rows += [(name, f"{step['at_s']:.1f} s", step["step"]) for step in steps[:_MOST_MOVES]]
        if len(steps) > _MOST_MOVES:
            rows.append((name, "", f"and {len(steps) - _MOST_MOVES} more (see --json)"))
    return rows


def goal_rows(outcomes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The goals of a case, each with its value in every run."""
    rows: list[Row] = []
    for outcome in outcomes:
        for goal in outcome.get("goals", ()):
            bound = f"at least {goal['at_least']:g}" if goal["at_least"] is not None else ""
            bound = bound or f"at most {goal['at_most']:g}"
            against = f" of {goal['relative_to']}'s" if goal["relative_to"] else ""
            rows.append(
                (
                    "reached" if goal["is_reached"] else "missed",
                    f"seed {outcome['seed']}",
                    goal["system"],
                    f"{goal['metric']} {bound}{against}",
                    f"{goal['value']:.4g}",
                )
            )
    return rows


def listing_rows() -> list[Row]:
    """What comes with the package: cases, datasets, profiles and systems."""
    rows: list[Row] = [("case", name, cases.read(name).about) for name in cases.names()]
    rows += [
        ("dataset", name, "its lengths of prompts and answers; give --rps") for name in DATASETS
    ]
    rows += [("profile", name, profiles.load(name).source) for name in profiles.names()]
    told = {
        "banaserve": "prefill and decode apart, the global store, migration",
        "colocated": "every instance does both, as vLLM alone",
        "static": "prefill and decode apart, nothing moves",
    }
    rows += [("system", name, told[name]) for name in KINDS]
    return rows
