"""Real loads over several replicas and regions, in virtual time, under every routing policy.

    python -m benchmarks routers --data FOLDER [--seeds 3] [--cells N] [--json FILE]

FOLDER holds traces, agents, texts and documents (``benchmarks/routers/loads.py``). A cell is a load
below, at or above what its replicas can do, in one region or in three of unequal load, with a KV
store behind the replicas of a region or without; all systems of a cell and seed meet the same
clients, the balancers' policies are the real ones, the replicas are modelled. An existing FILE is
continued: a cell that it has is not run again.

``route_regret_max`` is the highest regret of ``predicted_latency`` in any cell: how much longer its
mean latency is than that of the cell's best system. Every system has the highest and the mean
regret of its latency and of its time to first token. ``raw`` has, cell by cell, each system's means
over the seeds, in the order of ``columns``; ``bound`` is the share of prompt tokens that one
unlimited cache would hold. ``last_answer_s`` is the time that a session waits until the first token
of its last answer, without its own pauses. A request is good (``goodput``) with a first token
within 1 s and 0.1 ms per prompt token and at most 50 ms per further token. Imbalance is the longest
busy time of a replica over the mean.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve_bench.results import result
from banaserve_route.sim.world import RequestOutcome, simulate
from benchmarks.measurement import Measurement, Samples, earlier, parser_of
from benchmarks.routers.cells import SYSTEMS, VARIANTS, RouterCell, cells

DEFAULT = "predicted_latency"
BASELINE = "round_robin"
COLUMNS = (
    *("latency_s", "ttft_s", "ttft_p90_s", "ttft_p99_s", "last_answer_s"),
    *("hits", "imbalance", "goodput", "num_open"),
)
Row = list[float]


def measures(outcome: RequestOutcome) -> Row:
    """Return the figures of one run, in the order of ``COLUMNS``."""
    done = outcome.done()
    last = {one.client: one for one in outcome.records}
    waits_s = [one.first_s - one.began_s for one in last.values() if one.first_s is not None]
    return [
        outcome.mean_e2e_s,
        outcome.mean_ttft_s,
        outcome.ttft_s(0.9),
        outcome.ttft_s(0.99),
        sum(waits_s) / max(1, len(waits_s)),
        outcome.hit_fraction,
        max(outcome.busy_s) * len(outcome.busy_s) / sum(outcome.busy_s),
        sum(_is_good(one) for one in done) / len(outcome.records),
        outcome.num_censored,
    ]


def _is_good(one: Any) -> bool:
    ttft_s, rest_s = one.first_s - one.sent_s, one.done_s - one.first_s
    return bool(ttft_s <= 1 + 1e-4 * one.prompt_tokens and rest_s <= 0.05 * one.output_tokens)


def run(cell: RouterCell, data: Path, seeds: int) -> dict[str, Any]:
    """Return each system's means over the seeds, and the bound of an unlimited cache."""
    found: dict[str, list[Row]] = {name: [] for name in cell.systems}
    bounds = []
    for seed in range(seeds):
        setting, bound = cell.setting(data, seed)
        bounds.append(bound)
        for name, system in cell.systems.items():
            found[name].append(measures(simulate(setting, system, seed)))
    rows = {
        name: [_mean(column) for column in zip(*each, strict=True)] for name, each in found.items()
    }
    return {"bound": _mean(bounds), "systems": rows}


def regrets(raw: Mapping[str, Any], name: str, column: str) -> list[float]:
    """Return how far ``name`` is above the best system in each of its cells, as a share."""
    place = COLUMNS.index(column)
    return [
        rows[name][place] / min(row[place] for row in rows.values()) - 1
        for rows in (cell["systems"] for cell in raw.values())
        if name in rows
    ]


def figures(raw: Mapping[str, Any]) -> Samples:
    """Return the figures over all cells of ``raw``."""
    found: Samples = {"route_regret_max": ([max(regrets(raw, DEFAULT, "latency_s"))], "fraction")}
    pairs = [(cell["systems"][DEFAULT], cell["systems"][BASELINE]) for cell in raw.values()]
    for place, column in ((0, "latency"), (1, "ttft")):
        worst = max(ours[place] / theirs[place] for ours, theirs in pairs)
        found[f"{column}_over_{BASELINE}_max"] = [worst], "ratio"
    hits = COLUMNS.index("hits")
    for name, cell in raw.items():
        if name.startswith("agents, below"):
            share = cell["systems"][DEFAULT][hits] / cell["bound"]
            found[f"hits over bound, {name}"] = [share], "fraction"
    for name in (*SYSTEMS, *VARIANTS):
        for column in ("latency_s", "ttft_s"):
            if not (values := regrets(raw, name, column)):
                continue
            kind = f"{column.removesuffix('_s')}_regret"
            found[f"{name} {kind}_mean"] = [_mean(values)], "fraction"
            found[f"{name} {kind}_max"] = [max(values)], "fraction"
    return found


def table(raw: Mapping[str, Any]) -> str:
    """Return a Markdown table: the best system of each cell, and the default's regret there."""
    lines = [
        f"| Cell | Best latency, s | Best TTFT, s | {DEFAULT}, s | Regret | {BASELINE}, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, cell in raw.items():
        rows = cell["systems"]
        best = [min(rows, key=lambda one: rows[one][place]) for place in (0, 1)]
        cells_ = [f"`{one}` {rows[one][place]:.3g}" for place, one in enumerate(best)]
        ours, theirs = (f"{rows[one][0]:.3g}, {rows[one][1]:.3g}" for one in (DEFAULT, BASELINE))
        regret = rows[DEFAULT][0] / rows[best[0]][0] - 1
        lines.append(f"| {name} | {' | '.join(cells_)} | {ours} | {regret:.3f} | {theirs} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = parser_of("routers", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER")
    add("--seeds", type=positive, default=3)
    add("--cells", type=positive, help="run so many that the file lacks, then end")
    given = parser.parse_args(list(argv))
    options = {"seeds": given.seeds}
    left = earlier(given.json, "routers", options)
    if left is not None and left.commit != result.commit()[0]:
        raise UserError(f"{given.json} is of another commit: give another file")
    measurement = Measurement("routers", Namespace(json=given.json, **options))
    notes = [" ".join(part.split()) for part in str(__doc__).split("\n\n")[2:]]
    raw = dict(left.raw["outcomes"]) if left else {}
    for cell in [one for one in cells() if one.name not in raw][: given.cells]:
        raw[cell.name] = run(cell, given.data, given.seeds)
        told = {"columns": list(COLUMNS), "outcomes": raw}
        measurement.keep(measurement.result(figures(raw), notes, raw=told))
    print(table(raw))
    for name, (values, _) in figures(raw).items():
        print(f"{name}: {values[0]:.3f}")
    return 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
