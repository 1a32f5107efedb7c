"""Is ``banaserve plan`` right: on runs of real GPUs, on paced engines, on engines of a CPU?

    python -m benchmarks plan [--json FILE]
    python -m benchmarks plan --part paced [--cells N] [--json FILE]
    python -m benchmarks plan --part cpu [--json FILE]

Part paced: advice on 24 cells, before their best colocated system and best split run on engines in
modelled time. A file that has cells already keeps them. Part cpu: twelve arrangements of engines on
this machine, predicted from step times that a probe measures. The rest is of the first part.

Compared are whole runs of split and of aggregated engines in aiconfigurator-core with the same
backend, model, GPU, precision and lengths: DeepSeek-V3 under TensorRT-LLM and SGLang. vLLM has no
such group: 14 of its 17 split runs are on a GPU without aggregated runs of that model, and three do
not tell the number of clients. Rows that mix in runs with draft tokens, or do not tell the number
of workers, are left out, as are runs of more than 1,024 clients. A case is a group under limits of
mean TTFT and TPOT that runs of both kinds have met; limits that change nothing are no new case. The
truth is the ratio of the highest output tokens per second and GPU, which follow from latency in a
closed loop: a split pays if the ratio is at least 1.05; two runs of one configuration differ by up
to 5%.

The verdict is that of the advisor's rule, on simulated closed loops with the step times of the
package's operators of each backend, longer and shorter by their error. Constants, and the error on
runs left out, are of configurations with an even hash; judged are the others, but for kinds of
engines without three fitted runs. The same is done with the halves swapped. Beside it is what
AIConfigurator estimates for the same runs: it recommends the higher rate, without an error. Then
come the classical cases, on operators of vLLM.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.cli.terminal.console import print_rows
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.advisor import Advice
from banaserve_bench.plan.search.gain import Answer, Gain, answer
from banaserve_bench.plan.search.trial import Scenario, scenarios
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.plan import cpu, paced
from benchmarks.plan.blind_cells import NUM_CELLS
from benchmarks.plan.calibration import Calibrated, calibrated, simulated
from benchmarks.plan.classical import ClassicalCase, advised, cases, is_right
from benchmarks.plan.engines import engine_of
from benchmarks.plan.own_estimate import best_estimate
from benchmarks.plan.runs import ServedRun, comparable, read_runs
from benchmarks.plan.verdicts import BestRates, Means, gain, right_answer

_MOST_CLIENTS = 1024
"""Clients of a run, at most: more take minutes to simulate."""
_TTFT_LIMITS_S = (2.0, 10.0)
_TPOT_LIMITS_S = tuple(
    one / 1e3 for one in (7.5, 10, 12.5, 15, 17.5, 20, 25, 30, 35, 40, 50, 60, 75, 100)
)
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
        return right_answer(self.truth)

    @property
    def told(self) -> Answer:
        """Answer by the advisor's rule."""
        return answer(self.found, is_error_known=True)

    @property
    def estimated(self) -> Answer:
        """Answer by AIConfigurator's estimates."""
        return Answer.CANNOT_TELL if self.estimate is None else right_answer(self.estimate)


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


def judged(runs: Sequence[ServedRun], by_even: bool) -> list[JudgedRun]:
    """Return the runs of one half's comparable groups, simulated by constants of the other half.

    Args:
        by_even: True if runs with an even hash are fitted, and the others judged.
    """
    fitted = [run for run in runs if run.is_even is by_even]
    others = comparable([run for run in runs if run.is_even is not by_even])
    known = [(run, calibrated(run, fitted)) for of in others.values() for run in of]
    return [JudgedRun.of(run, one) for run, one in known if one is not None]


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


def main(argv: Sequence[str]) -> int:
    """Run the part that is asked for, and write the result; return the exit code."""
    parser = parser_of("plan", __doc__)
    add = parser.add_argument
    add("--part", choices=tuple(_PARTS), default="runs", help="what the advice is compared with")
    add("--cells", type=positive, default=NUM_CELLS, help="of paced and cpu, only the first N")
    add("--load-s", type=float, default=25.0, help="of paced and cpu: most wall time of arrivals")
    add("--probe-s", type=float, default=120.0, help="of cpu: time of the probe")
    given = parser.parse_args(list(argv))
    if not given.load_s > 0:
        raise UserError(f"--load-s {given.load_s:g}: give more than 0")
    return _PARTS[given.part](given)


def _judge_runs(given: argparse.Namespace) -> int:
    """Judge both halves and the classical cases, and write what was right."""
    measurement = Measurement("plan", given)
    runs = _known_runs()
    samples: Samples = {}
    raw: dict[str, Any] = {}
    for half, by_even in (("judged", True), ("swapped", False)):
        found = judged(runs, by_even)
        of_half = list(split_cases(found))
        print(half)
        print_rows(list(_rows(of_half)), {})
        raw[half] = {"cases": [_record(one) for one in of_half], "runs": [*map(_errors, found)]}
        samples |= {f"{half}, {name}": of for name, of in _samples(found, of_half).items()}
    told = [(case, advised(case)) for case in cases()]
    raw["classical"] = [_classical(*one) for one in told]
    rows = [[str(one) for one in case.values()] for case in raw["classical"]]
    print_rows([[*raw["classical"][0]], *rows], {})
    samples["classical, right"] = ([_share([is_right(*one) for one in told])], "share")
    measurement.deliver(measurement.result(samples, [str(__doc__)], raw=raw))
    return 0


_PARTS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "runs": _judge_runs,
    "paced": paced.measure_cells,
    "cpu": cpu.measure_arrangements,
}


def _known_runs() -> list[ServedRun]:
    """Return the runs of all stacks with comparable groups whose engines the package knows."""
    runs = [run for run in read_runs() if run.clients <= _MOST_CLIENTS]
    stacks = {run.stack for of in comparable(runs).values() for run in of}
    return [
        run
        for run in runs
        if run.stack in stacks
        and engine_of(run, run.engines.shape) is not None
        and (run.prefill is None or engine_of(run, run.prefill.shape) is not None)
    ]


def _samples(found: Sequence[JudgedRun], of: Sequence[SplitCase]) -> Samples:
    """Return samples and their unit by figure, of one half."""
    given = [one for one in of if one.told is not Answer.CANNOT_TELL]
    estimated = [one for one in of if one.estimate is not None]
    wrong = [_errors(one) for one in found]
    shares: dict[str, list[bool]] = {
        "pays": [one.pays is Answer.YES for one in of],
        "verdict given": [one in given for one in of],
        "verdict right": [one.told is one.pays for one in given],
        "wrong yes": [one.told is Answer.YES and one.pays is Answer.NO for one in of],
        "AIConfigurator right": [one.estimated is one.pays for one in estimated],
        "AIConfigurator wrong yes": [
            one.estimated is Answer.YES and one.pays is Answer.NO for one in of
        ],
    }
    counts = {"groups": len({one.group for one in of}), "cases": len(of)}
    return {
        **{name: ([float(number)], "number") for name, number in counts.items()},
        **{name: ([_share(values)], "share") for name, values in shares.items()},
    } | {
        f"{name} error": ([abs(one[name]) for one in wrong], "relative error without sign")
        for name in ("TPOT", "TTFT")
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / max(1, len(values))


def _errors(one: JudgedRun) -> dict[str, Any]:
    run = one.run
    return {
        "id": run.id,
        "TPOT": one.predicted.tpot_s / run.tpot_s - 1,
        "TTFT": one.predicted.ttft_s / run.ttft_s - 1,
        "error said": asdict(one.known.error),
    }


def _record(one: SplitCase) -> dict[str, Any]:
    low, estimate, high = one.found.whole
    return {
        "group": list(one.group),
        "limits": asdict(one.limits),
        "measured": one.truth,
        "pays": one.pays,
        "gain": {"low": low, "estimate": estimate, "high": high},
        "told": one.told,
        "AIConfigurator": one.estimate,
    }


def _rows(of: Sequence[SplitCase]) -> Iterator[Sequence[str]]:
    yield "group", "TTFT, TPOT", "measured", "gain", "told", "AIConfigurator"
    for one in of:
        low, estimate, high = one.found.whole
        backend, _, *rest = map(str, one.group)
        yield (
            " ".join((backend, *rest)),
            f"{one.limits.ttft_s:g} s, {one.limits.tpot_s * 1e3:g} ms",
            f"{one.truth:.2f} {one.pays}",
            f"{estimate:.2f} ({low:.2f} to {high:.2f})",
            one.told if one.told in (one.pays, Answer.CANNOT_TELL) else f"{one.told}: wrong",
            "none" if one.estimate is None else f"{one.estimate:.2f}",
        )


def _classical(case: ClassicalCase, advice: Advice) -> dict[str, Any]:
    gained = advice.found
    return {
        "case": case.name,
        "answer": advice.answer,
        "right": is_right(case, advice),
        "gain": gained and [round(one, 3) for one in gained.whole],
        "offers": [f"{one.kind}: {one.offered.candidate.name}" for one in advice.offers],
    }
