"""The tables of SkyWalker, GORGO and Preble beside what the simulator gives.

    python -m benchmarks.simulate_seeds [--seeds 5] [--only skywalker] [--json FILE]
    python -m benchmarks.simulate_seeds --json FILE --report FILE.md

All systems of a seed meet the same clients. Requests without an end when the time is over are
counted ("open") and their waiting so far is in the latencies. Throughput is given as output tokens
a second and as SkyWalker counts it, prompt plus twice the output. What the papers do not give
(hardware times, lengths, distances) is assumed in ``banaserve/sim/regions``; so ratios are to be
read, not values. A FILE that is there is gone on with: a case that it has is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from banaserve.bench.results import result
from banaserve.bench.results.result import Figure, figure
from banaserve.bench.results.statistics import mean_interval
from banaserve.errors import UserError
from banaserve.sim.regions.world import RequestOutcome, simulate
from benchmarks.simulate_seeds_cases import PAPERS, PaperCase

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
    """Returns the name under which a result has it."""
    return f"{case} | {system} | {measure}"


def run(case: PaperCase, seeds: Sequence[int]) -> dict[str, Figure]:
    """Simulates every system of ``case``; returns a figure for each measure, a sample a seed."""
    figures = {}
    for name, system in case.systems.items():
        outcomes = [simulate(case.setting, system, seed) for seed in seeds]
        for measure, (unit, value) in MEASURES.items():
            samples = [value(outcome) for outcome in outcomes]
            figures[figure_name(case.name, name, measure)] = figure(samples, unit)
    return figures


def table(case: PaperCase, figures: dict[str, Figure]) -> Table:
    """Returns means with their 95 % intervals (Student)."""
    shown = Table(title=case.name, caption=f"paper: {case.paper}", title_justify="left")
    for heading in ("system", *MEASURES):
        shown.add_column(heading, justify="left" if heading == "system" else "right")
    for name in case.systems:
        shown.add_row(
            name, *(cell(figures[figure_name(case.name, name, one)].samples) for one in MEASURES)
        )
    return shown


def cell(samples: Sequence[float]) -> str:
    """Returns a mean and half its interval."""
    low, mean, high = mean_interval(samples)
    return f"{mean:.3g} ±{(high - low) / 2:.2g}"


def _begun(path: Path | None, seeds: int) -> tuple[dict[str, Figure], dict[str, object]]:
    """Returns the figures that ``path`` has, and the commit of each case."""
    if path is None or not path.exists():
        return {}, {}
    found = result.read(path)
    if found.options.get("seeds") != seeds:
        raise UserError(f"{path} has {found.options.get('seeds')} seeds: give another file")
    return dict(found.figures), dict(found.raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=PAPERS)
    parser.add_argument("--cases", type=int, help="run so many that the file lacks, then end")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--report", type=Path, help="write the tables")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error("one seed tells nothing of the spread: give 2 or more")
    started_at, console = datetime.now(UTC), Console(width=200)
    figures, commits = _begun(given.json, given.seeds)
    left = given.cases
    for paper in [given.only] if given.only else PAPERS:
        for case in PAPERS[paper]():
            if case.name not in commits:
                if left == 0:
                    return
                left = left and left - 1
                figures |= run(case, range(given.seeds))
                record = result.result(
                    "simulate_seeds",
                    seed=0,
                    options={"seeds": given.seeds},
                    started_at=started_at,
                    figures=figures,
                    notes=[str(__doc__), "raw: the commit that each case was run with"],
                    raw=commits,
                )
                commits[case.name] = record.commit
                record.raw[case.name] = record.commit
                if given.json is not None:
                    result.write(record, given.json)
            console.print(table(case, figures))
    if given.report is not None:
        from benchmarks.simulate_seeds_report import markdown

        given.report.write_text(markdown(figures, given.seeds))


if __name__ == "__main__":
    main()
