"""Claims of SkyWalker, GORGO and Preble, compared with the simulator's figures.

    python -m benchmarks simulate-seeds --data FOLDER [--seeds 10] [--only SkyWalker] [--json FILE]

FOLDER holds the loads (``benchmarks/routers/loads.py``). All systems of a seed meet the same
clients. Requests that have not ended when the time is over are counted ("open"), and their waiting
so far is in the latencies. Throughput is given as output tokens a second and as SkyWalker counts
it, prompt plus twice the output. What the papers do not give (hardware times, distances) is assumed
in ``benchmarks/simulate_seeds/cases.py``; so only ratios are meaningful, not values. The rule of
the verdicts is in ``benchmarks/simulate_seeds/claims.py``. An existing FILE is continued: a case
that it has is not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from banaserve_bench.results import result
from benchmarks.measurement import earlier, parser_of
from benchmarks.simulate_seeds.cases import PAPERS
from benchmarks.simulate_seeds.figures import run
from benchmarks.simulate_seeds.report import case_table, claims_tables, totals, verdict_figures


def main(argv: Sequence[str]) -> int:
    parser = parser_of("simulate-seeds", __doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=PAPERS)
    parser.add_argument("--cases", type=int, help="run so many that the file lacks, then end")
    given = parser.parse_args(list(argv))
    if given.seeds < 2:
        parser.error("one seed tells nothing of the spread: give 2 or more")
    started_at = datetime.now(UTC)
    options = {"seeds": given.seeds}
    known = earlier(given.json, "simulate-seeds", options)
    figures, commits = (dict(known.figures), dict(known.raw)) if known else ({}, {})
    left = given.cases
    for paper in [given.only] if given.only else PAPERS:
        for case in PAPERS[paper]():
            if case.name not in commits:
                if left == 0:
                    return 0
                left = left and left - 1
                figures |= run(case, given.data, range(given.seeds * case.seed_factor))
                record = result.result(
                    "simulate_seeds",
                    seed=0,
                    options=options,
                    started_at=started_at,
                    figures=figures | verdict_figures(figures),
                    notes=[str(__doc__), "raw: the commit that each case was run with"],
                    raw=commits,
                )
                commits[case.name] = record.commit
                record.raw[case.name] = record.commit
                if given.json is not None:
                    result.write(record, given.json)
            print(f"\n{case.name}: {case.load}\n\n{case_table(case, figures)}")
    print("\n".join([totals(figures), *claims_tables(figures)]))
    return 0
