"""Tables of a comparison in a report beyond latencies: ratios, simulator's error, decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from banaserve_bench.report.standings import loads_of
from banaserve_bench.report.tables import Table, is_empty
from banaserve_bench.serving.summary import Summary

Cells = Mapping[str, Sequence[Summary]]


_OURS = "banaserve"
_COMPARED = (
    ("output tokens/s", "output_tokens_per_s"),
    ("goodput /s", "goodput_per_s"),
    ("TTFT p50", "ttft_p50"),
    ("TTFT p99", "ttft_p99"),
    ("TPOT p50", "tpot_p50"),
    ("e2e mean", "e2e_mean"),
)


def extra_tables(raw: Mapping[str, Any], cells: Cells, simulated: Cells) -> list[tuple[str, Table]]:
    """Return the tables of a comparison that are not empty, with their captions."""
    found = [
        (
            f"{_OURS} over each of the others, the same requests; means over seeds",
            _ratios(cells, simulated),
        ),
        ("The simulator over the engines, the same requests", _errors(cells, simulated)),
        ("Steps that the orchestrator began", _decisions(raw.get("decisions", {}))),
    ]
    return [(caption, table) for caption, table in found if not is_empty(table)]


def _mean(cells: Sequence[Summary], load: str, metric: str) -> float | None:
    values = [
        one.metrics[metric] for one in cells if one.load_name == load and metric in one.metrics
    ]
    return sum(values) / len(values) if values else None


def _over(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours is not None and theirs else "-"


def _ratios(cells: Cells, simulated: Cells) -> Table:
    told = [name for name, _ in _COMPARED]
    head = ["over", "load", *told]
    if simulated:
        head += ["tokens/s simulated"]
    table = [head]
    for other in cells:
        if other == _OURS or _OURS not in cells:
            continue
        for load in loads_of({other: cells[other]}):
            ours, theirs = cells[_OURS], cells[other]
            row = [other, load]
            row += [_over(_mean(ours, load, m), _mean(theirs, load, m)) for _, m in _COMPARED]
            if simulated:
                metric = "output_tokens_per_s"
                ours, theirs = simulated.get(_OURS, ()), simulated.get(other, ())
                row += [_over(_mean(ours, load, metric), _mean(theirs, load, metric))]
            table.append(row)
    return table


def _errors(cells: Cells, simulated: Cells) -> Table:
    table = [["system", "load", *(name for name, _ in _COMPARED)]]
    for name, predicted in simulated.items():
        for load in loads_of({name: cells.get(name, ())}):
            row = [
                _over(_mean(predicted, load, m), _mean(cells[name], load, m)) for _, m in _COMPARED
            ]
            table.append([name, load, *row])
    return table


def _decisions(by_system: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return the decisions; times count from the start of the system's requests, all its cells."""
    table = [["system", "at, s", "step", "predicted cost, s", "benefit, s", "took, s", "ending"]]
    for name, decisions in by_system.items():
        for one in decisions:
            for step in one["steps"]:
                numbers = [f"{step[key]:.2f}" for key in ("cost_s", "benefit_s", "took_s")]
                ending = ": ".join(filter(None, (step["ending"], step["reason"])))
                table.append([name, f"{one['at_s']:.1f}", step["what"], *numbers, ending])
    return table
