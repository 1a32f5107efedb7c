"""BanaServe's figures 8 to 11 in the simulator: two models, two workloads, 1 to 20 requests/s.

``python -m benchmarks simulate-paper [--out benchmarks/results] [--jobs 2]``; plots need
matplotlib (``pip install .[plots]``). Writes ``simulate-paper.json``, ``simulate-paper.md`` and a
PNG for each figure. An interrupted call is resumed as long as the code is the same.

Time is modelled, no engine runs. The paper names neither the number of GPUs nor how its baselines
were set up, nor how long the answers were; the assumptions made instead are the same for all
figures and are in ``runs.SYSTEMS`` and ``runs.READINGS``. The elastic policy plans by limits of
latency, which the paper does not have: ``runs.limits_of`` gives them, by one rule for all cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from banaserve.arguments import Parser
from banaserve.bench.results import result
from banaserve.sim.result import SIMULATED
from benchmarks.location import ROOT
from benchmarks.script import run_script
from benchmarks.simulate_paper.report import MEANINGS, figures_of, markdown, plot
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


def main(argv: Sequence[str]) -> int:
    """Run what is not kept yet and write results, page and plots; return the exit code."""
    parser = Parser(prog="python -m benchmarks simulate-paper", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cache", type=Path, help="default: a file beside the results, removed")
    given = parser.parse_args(list(argv))
    if find_spec("matplotlib") is None:
        parser.error("the package matplotlib is missing: pip install .[plots]")
    started_at = datetime.now(UTC)
    cache = given.cache or given.out / f".simulate-paper-{fingerprint()}.jsonl"
    runs = measured(cache, given.jobs)
    record = result.result(
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
            f"fig{figure.number}_{reading}_limits": asdict(limits_of(figure, reading))
            for figure in FIGURES
            for reading in READINGS
        },
    )
    result.write(record, given.out / "simulate-paper.json")
    (given.out / "simulate-paper.md").write_text(markdown(runs))
    for figure in FIGURES:
        plot(figure, runs, given.out / f"simulate-paper-figure{figure.number}.png")
    if given.cache is None:
        cache.unlink()
    return 0


if __name__ == "__main__":
    run_script(main)
