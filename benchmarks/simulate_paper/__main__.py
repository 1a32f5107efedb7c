"""BanaServe's figures 8 to 11 in the simulator: two models, two workloads, 1 to 20 requests/s.

``python -m benchmarks simulate-paper [--json benchmarks/results/simulate-paper.json] [--jobs 2]``;
``python -m benchmarks results`` makes page and plots of the file. An interrupted call is resumed as
long as the code is the same.

Time is modelled, no engine runs. The paper names neither the number of GPUs nor how its baselines
were set up, nor how long the answers were; the assumptions made instead are the same for all
figures and are in ``runs.SYSTEMS`` and ``runs.READINGS``. The elastic policy plans by limits of
latency, which the paper does not have: ``runs.limits_of`` gives them, by one rule for all cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from banaserve.base.arguments import Parser
from banaserve.sim.result import SIMULATED
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from benchmarks.location import ROOT
from benchmarks.script import run_script
from benchmarks.simulate_paper.report import MEANINGS, Runs, figures_of, limits_name
from benchmarks.simulate_paper.runs import (
    FIGURES,
    LIMIT_FACTOR,
    MAX_OUTPUT_TOKENS,
    MEASURED_S,
    RATES,
    READINGS,
    SEEDS,
    WARM_S,
    fingerprint,
    limits_of,
    measured,
)

DEFAULT = ROOT / "benchmarks" / "results" / "simulate-paper.json"


def main(argv: Sequence[str]) -> int:
    """Run what is not kept yet and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks simulate-paper", description=__doc__)
    parser.add_argument("--json", type=Path, default=DEFAULT)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="default: a file beside the result, removed")
    given = parser.parse_args(list(argv))
    started_at = datetime.now(UTC)
    cache = given.cache or given.json.with_name(f".simulate-paper-{fingerprint()}.jsonl")
    runs = measured(cache, given.jobs)
    result.write(result_of(runs, started_at), given.json)
    if given.cache is None:
        cache.unlink()
    return 0


def result_of(runs: Runs, started_at: datetime) -> Result:
    """Return the result of all runs."""
    return result.result(
        "simulate-paper",
        seed=SEEDS[0],
        options={
            "rates_per_s": list(RATES),
            "seeds": list(SEEDS),
            "warm_s": WARM_S,
            "measured_s": MEASURED_S,
            "max_output_tokens": MAX_OUTPUT_TOKENS,
            "limit_factor": LIMIT_FACTOR,
        },
        started_at=started_at,
        figures=figures_of(runs),
        notes=[SIMULATED, *(f"{name}: {words}" for name, words in READINGS.items()), *MEANINGS],
        raw={
            limits_name(figure, reading): asdict(limits_of(figure, reading))
            for figure in FIGURES
            for reading in READINGS
        },
    )


if __name__ == "__main__":
    run_script(main)
