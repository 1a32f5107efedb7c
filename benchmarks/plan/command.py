"""The rule of ``banaserve plan`` on real GPUs: does it say yes only where a split has paid?

    python -m benchmarks plan [--jobs 1] [--json FILE]

Compared are whole runs of split and of aggregated engines in aiconfigurator-core with the same
backend, model, GPU, precision and lengths. Only TensorRT-LLM and SGLang have them: the package's
17 split runs of vLLM have no aggregated run of the same model and GPU beside them, or do not tell
the number of clients. A case is a group under limits of mean TTFT and TPOT that both kinds have met.
The truth is the ratio of their best output tokens per second and GPU: a split pays if it is at
least 1.05, and by less than that runs of the same configuration differ, too.

The verdict is that of the advisor's rule on simulated closed loops, with the step times of the
package's operators for each backend, and steps longer and shorter by their error. Constants, and
errors on runs left out, are of configurations with an even hash; judged are the others. Beside it is
what AIConfigurator estimates for the same runs; it recommends the higher rate, without an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from banaserve.base.arguments import Parser
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.gain import WORTH, Answer, Gain, answer
from banaserve_bench.plan.trial import Scenario, scenarios
from banaserve_bench.results import result
from benchmarks.plan.calibration import Calibrated, calibrated, simulated
from benchmarks.plan.classical import ClassicalCase, advised, cases, is_right
from benchmarks.plan.engines import engine_of
from benchmarks.plan.own_estimate import best_estimate
from benchmarks.plan.runs import ServedRun, comparable, read_runs
from benchmarks.plan.verdicts import BestRates, Means, gain

_MOST_CLIENTS = 1024
"""Clients of a run, at most: more take minutes to simulate."""
_TTFT_LIMITS_S = (2.0, 10.0)
_TPOT_LIMITS_S = (0.0075, 0.01, 0.0125, 0.015, 0.0175, 0.02, 0.025)
_TPOT_LIMITS_S += (0.03, 0.035, 0.04, 0.05, 0.06, 0.075, 0.1)
_UNIT = LatencyLimits(1.0, 1.0)


class SplitCase(NamedTuple):
    """Comparable runs under limits, and what is said of them.

    Attributes:
        rates: Measured best rates of both kinds.
        found: Gain by the advisor's rule.
        estimate: Ratio of the rates that AIConfigurator estimates; None if a kind has none.
    """

    group: tuple[Any, ...]
    limits: LatencyLimits
    rates: BestRates
    found: Gain
    estimate: float | None

    @property
    def truth(self) -> float:
        """Ratio of the measured rates, of the split over aggregated engines."""
        return self.rates.split / self.rates.aggregated

    @property
    def pays(self) -> Answer:
        """Right answer."""
        return _answer(self.truth)

    @property
    def told(self) -> Answer:
        """Answer by the advisor's rule."""
        return answer(self.found, is_error_known=True)

    @property
    def estimated(self) -> Answer:
        """Answer by AIConfigurator's estimates."""
        return Answer.CANNOT_TELL if self.estimate is None else _answer(self.estimate)


def _answer(ratio: float) -> Answer:
    return Answer.YES if ratio >= WORTH else Answer.NO


class JudgedRun(NamedTuple):
    """A run that was not fitted, and its simulated means with steps as long as predicted or not."""

    run: ServedRun
    known: Calibrated
    slow: Means
    predicted: Means
    fast: Means

    @classmethod
    def of(cls, run: ServedRun, known: Calibrated) -> JudgedRun:
        """Simulate ``run`` at three step times."""
        return cls(run, known, *(_means(run, known, one) for one in scenarios(_UNIT, known.error)))


def _means(run: ServedRun, known: Calibrated, scenario: Scenario) -> Means:
    found = simulated(run, known.constants, scenario.factor)
    # A shorter limit of TTFT stands for a longer TTFT.
    return Means(found.ttft_s / scenario.limits.ttft_s, found.tpot_s)


def judged(runs: Sequence[ServedRun]) -> list[JudgedRun]:
    """Return the runs of comparable groups with an odd hash, simulated by constants of even ones."""
    even = [run for run in runs if run.is_even]
    found = []
    odd = [run for run in runs if not run.is_even]
    for run in (run for of in comparable(odd).values() for run in of):
        known = calibrated(run, even)
        if known is not None:
            found.append(JudgedRun.of(run, known))
    return found


def split_cases(found: Sequence[JudgedRun]) -> Iterator[SplitCase]:
    """Yield the cases of all comparable groups; limits that change nothing make no new case."""
    measured = {one.run.id: Means(one.run.ttft_s, one.run.tpot_s) for one in found}
    simulations: Sequence[Mapping[str, Means]] = [
        {one.run.id: getattr(one, name) for one in found} for name in ("slow", "predicted", "fast")
    ]
    for group, runs in comparable([one.run for one in found]).items():
        seen = set()
        for limits in (LatencyLimits(a, b) for a in _TTFT_LIMITS_S for b in _TPOT_LIMITS_S):
            rates = BestRates.of(runs, measured, limits)
            if not rates.are_known or rates in seen:
                continue
            seen.add(rates)
            slow, predicted, fast = (BestRates.of(runs, of, limits) for of in simulations)
            own = BestRates(
                best_estimate([run for run in runs if run.is_split], limits),
                best_estimate([run for run in runs if not run.is_split], limits),
            )
            estimate = own.split / own.aggregated if own.are_known else None
            yield SplitCase(group, limits, rates, gain(slow, predicted, fast), estimate)
