"""BanaServe's figures 8 to 11 in the simulator: two models, two workloads, 1 to 20 requests/s.

``python -m benchmarks simulate-paper [--json benchmarks/results/simulate-paper.json] [--jobs 2]``;
``python -m benchmarks results`` makes page and plots of the file. An interrupted call is resumed
from its --json as long as the code is the same.

Time is modelled, no engine runs. The paper names neither the number of GPUs nor how its baselines
were set up, nor how long the answers were; the assumptions made instead are the same for all
figures and are in ``runs.SYSTEMS`` and ``runs.READINGS``. The elastic policy plans by limits of
latency, which the paper does not have: ``runs.limits_of`` gives them, by one rule for all cells.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from banaserve.base.arguments import positive
from banaserve.sim.result import SIMULATED
from banaserve_bench.results.result import Result
from benchmarks.location import ROOT
from benchmarks.measurement import Measurement, earlier, parser_of
from benchmarks.simulate_paper.report import MEANINGS, Found, Runs, figures_of, limits_name
from benchmarks.simulate_paper.runs import (
    FIGURES,
    LIMIT_FACTOR,
    MAX_OUTPUT_TOKENS,
    MEASURED_S,
    RATES,
    READINGS,
    SEEDS,
    WARM_S,
    PaperRun,
    all_runs,
    limits_of,
    measure,
)
from benchmarks.workers import workers

DEFAULT = ROOT / "benchmarks" / "results" / "simulate-paper.json"
OPTIONS = {
    "rates_per_s": list(RATES),
    "seeds": list(SEEDS),
    "warm_s": WARM_S,
    "measured_s": MEASURED_S,
    "max_output_tokens": MAX_OUTPUT_TOKENS,
    "limit_factor": LIMIT_FACTOR,
}


def main(argv: Sequence[str]) -> int:
    parser = parser_of("simulate-paper", __doc__)
    parser.set_defaults(json=DEFAULT)
    parser.add_argument("--jobs", type=positive, default=1)
    given = parser.parse_args(list(argv))
    measurement = measurement_of(given.json)
    known = kept(given.json)
    missing = [run for run in all_runs() if run not in known]
    with workers(given.jobs) as pool:
        for number, found in enumerate(pool.map(measure, missing)):
            known[missing[number]] = found
            measurement.keep(unfinished(measurement, known))
            print(f"{number + 1} of {len(missing)} runs", flush=True)
    measurement.keep(result_of(measurement, [(run, known[run]) for run in all_runs()]))
    return 0


def measurement_of(path: Path) -> Measurement:
    """Return the measurement, which begins now, whose result is written to ``path``."""
    return Measurement("simulate-paper", Namespace(json=path, seed=SEEDS[0], **OPTIONS))


def unfinished(measurement: Measurement, known: dict[PaperRun, Found]) -> Result:
    """Return a result that only keeps the outcomes of runs, for ``kept``."""
    raw = {"runs": [[asdict(run), found] for run, found in known.items()]}
    return measurement.result({}, [f"INCOMPLETE: {len(known)} runs"], raw=raw)


def kept(path: Path) -> dict[PaperRun, Found]:
    """Return the outcomes that an interrupted call with the same code has left in ``path``."""
    left = earlier(path, "simulate-paper", OPTIONS, same_code=True)
    runs = () if left is None else left.raw.get("runs", ())
    return {PaperRun(**run): found for run, found in runs}


def result_of(measurement: Measurement, runs: Runs) -> Result:
    return measurement.result(
        figures_of(runs),
        [SIMULATED, *(f"{name}: {words}" for name, words in READINGS.items()), *MEANINGS],
        raw={
            limits_name(figure, reading): asdict(limits_of(figure, reading))
            for figure in FIGURES
            for reading in READINGS
        },
    )
