"""The judge of `banaserve plan`: rates, cases, calibration; runs that the simulator made itself."""

from __future__ import annotations

from importlib.util import find_spec
from math import sqrt

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.gain import MOST_RATIO, Answer, answer
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.costs import EngineConstants
from benchmarks.closed_loop import RunConstants
from benchmarks.plan import calibration
from benchmarks.plan.calibration import calibrated, simulated
from benchmarks.plan.command import SplitCase
from benchmarks.plan.own_estimate import estimates
from benchmarks.plan.runs import EngineGroup, EngineShape, ServedRun, comparable, read_runs
from benchmarks.plan.verdicts import BestRates, Means, gain
from benchmarks.silicon import LinearTimes
from benchmarks.whole_runs import KnownEngine

_HAS_PACKAGE = find_spec("aiconfigurator_core") is not None
_with_package = pytest.mark.skipif(not _HAS_PACKAGE, reason="the package is not there")
_ONE = EngineShape(1, 1, 1)
_ENGINE = KnownEngine(LinearTimes(load("llama-3.1-8b-h100")), 500_000)
_LIMITS = LatencyLimits(2.0, 0.02)


def _run(
    clients: int, prefill: int = 0, version: str = "1", prompt_tokens: int = 1000
) -> ServedRun:
    workers = EngineGroup(prefill, _ONE) if prefill else None
    return ServedRun(
        f"{clients}-{prefill}-{version}-{prompt_tokens}",
        "trtllm",
        version,
        "m",
        "gpu",
        "fp8",
        prompt_tokens,
        101,
        workers,
        EngineGroup(2 if prefill else 1, _ONE),
        clients,
        1.0,
        0.01,
    )


def test_the_rate_of_a_closed_loop_follows_from_its_latency() -> None:
    # 8 requests of 101 tokens in each 2 s, on one GPU and on three.
    assert _run(8).rate(1.0, 0.01) == pytest.approx(404)
    assert _run(8, prefill=1).rate(1.0, 0.01) == pytest.approx(404 / 3)


def test_between_two_runs_of_the_same_engines_clients_can_be_chosen() -> None:
    near, far = _run(8), _run(16)
    means = {near.id: Means(0.5, 0.01), far.id: Means(0.5, 0.0144)}
    limits = LatencyLimits(1.0, 0.012)
    found = BestRates.of([near, far], means, limits)
    # Half of the way in logarithms.
    assert found.aggregated == pytest.approx(near.rate(0.5, 0.012) * sqrt(2))
    assert not found.are_known
    wider = LatencyLimits(1.0, 0.05)
    assert BestRates.of([near, far], means, wider).aggregated == far.rate(0.5, 0.0144)
    # Not between other software, and not where clients are more than twice as many.
    for other in (_run(16, version="2"), _run(17)):
        found = BestRates.of([near, other], {**means, other.id: Means(0.5, 0.0144)}, limits)
        assert found.aggregated == near.rate(0.5, 0.01)
    # The limit of TTFT holds, too.
    late = {near.id: Means(0.5, 0.01), far.id: Means(0.72, 0.01)}
    found = BestRates.of([near, far], late, LatencyLimits(0.6, 0.012))
    assert found.aggregated == pytest.approx(near.rate(0.6, 0.01) * sqrt(2))


@pytest.mark.parametrize(
    ("slow", "predicted", "fast", "told"),
    [
        ((90, 45), (100, 50), (110, 55), Answer.YES),
        ((90, 90), (100, 100), (102, 102), Answer.CANNOT_TELL),
        ((45, 90), (50, 100), (55, 110), Answer.NO),
        # Nothing tells how much a kind serves that has no run within the limits.
        ((90, 0), (100, 0), (110, 0), Answer.CANNOT_TELL),
        ((0, 90), (0, 100), (0, 110), Answer.CANNOT_TELL),
        ((0, 45), (100, 50), (110, 55), Answer.CANNOT_TELL),
    ],
)
def test_a_kind_without_a_run_within_the_limits_gives_no_verdict(
    slow: tuple[float, float],
    predicted: tuple[float, float],
    fast: tuple[float, float],
    told: Answer,
) -> None:
    found = gain(BestRates(*slow), BestRates(*predicted), BestRates(*fast))
    assert 0 <= found.whole.low <= found.whole.estimate <= found.whole.high <= MOST_RATIO
    assert answer(found, is_error_known=True) is told


def test_a_gain_that_does_not_pay_is_no() -> None:
    equal = gain(*[BestRates(100, 100)] * 3)
    for split, pays in ((104, Answer.NO), (105, Answer.YES)):
        case = SplitCase((), _LIMITS, BestRates(split, 100), equal, 1.2)
        assert case.pays is pays
        assert (case.told, case.estimated) == (Answer.NO, Answer.YES)
    assert case._replace(estimate=None).estimated is Answer.CANNOT_TELL


def test_a_split_computes_prompts_apart_from_tokens() -> None:
    constants = RunConstants(way_s=0.1)
    split = calibration.served(_run(8, prefill=1), _ENGINE, _ENGINE, constants)
    whole = calibration.served(_run(8), _ENGINE, None, constants)
    decode, prompts, steps, *_ = split.parts
    assert prompts == 0
    assert decode > 0
    # One step a token; a request may join while one is under way.
    assert steps == pytest.approx(1.0, abs=0.02)
    assert split.tpot_s < whole.tpot_s
    alone = calibration.served(_run(1, prefill=1), _ENGINE, _ENGINE, constants)
    step_s = _ENGINE.times.step_s(900, 900 * 900, 0, 0)
    assert alone.ttft_s == pytest.approx(0.1 + step_s, rel=0.05)
    slow = calibration.served(_run(1, prefill=1), _ENGINE, _ENGINE, RunConstants(), 2.0)
    assert slow.tpot_s == pytest.approx(2 * alone.tpot_s, rel=0.02)


def test_constants_are_found_again_on_runs_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "engine_of", lambda run, shape: _ENGINE)
    made = RunConstants(EngineConstants(1e-3, 0.0, 1.3, 1.5), way_s=0.05)
    asked = [_run(c, prompt_tokens=p) for c in (2, 4, 8, 16) for p in (500, 2000)]
    runs = []
    for run in asked:
        found = simulated(run, made)
        runs.append(run._replace(ttft_s=found.ttft_s, tpot_s=found.tpot_s))
    left_out = runs.pop()
    known = calibrated(left_out, runs)
    assert known is not None
    assert known.error.step < 0.02
    again = simulated(left_out, known.constants)
    assert again.tpot_s == pytest.approx(left_out.tpot_s, rel=0.03)
    assert again.ttft_s == pytest.approx(left_out.ttft_s, rel=0.15)
    # Neither two runs, nor those of splits, are enough.
    assert calibrated(left_out, runs[:2]) is None
    assert calibrated(_run(8, prefill=1), runs) is None


@pytest.mark.skipif(_HAS_PACKAGE, reason="the package is there")
def test_without_the_package_the_error_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install 'banaserve-bench\[plan\]'"):
        read_runs()


@_with_package
def test_groups_have_both_kinds_and_none_is_of_vllm() -> None:
    runs = read_runs()
    groups = comparable(runs)
    assert len(groups) == 11
    assert {group[0] for group in groups} == {"sglang", "trtllm"}
    for of in groups.values():
        assert {run.is_split for run in of} == {True, False}
        assert len({run.group for run in of}) == 1
        # An aggregated engine is on one machine of eight GPUs.
        assert all(run.num_gpus <= 8 for run in of if not run.is_split)
        assert min(run.clients for run in of) >= 1
    halves = ({run[1:11] for run in runs if run.is_even is even} for even in (True, False))
    assert not set.intersection(*halves)


@_with_package
def test_groups_that_decode_apart_take_as_long_as_the_one_with_most() -> None:
    kinds = {"fmha": "bfloat16"}
    model = "deepseek-ai/DeepSeek-V3"
    times = AiconfiguratorTimes(model, "h200_sxm", 1, True, kinds, 8, "trtllm")
    eight = times.step_s(0, 0, 8, 8 * 2000)
    assert times.step_s(0, 0, 1, 2000) == eight
    assert times.step_s(0, 0, 9, 9 * 2000) > eight
    one = times.step_s(1000, 1000**2, 0, 0)
    assert times.step_s(8000, 8 * 1000**2, 0, 0) == pytest.approx(one)
    assert times.step_s(9000, 9 * 1000**2, 0, 0) > 1.2 * one


@_with_package
def test_estimates_of_the_package_are_of_both_kinds() -> None:
    runs = [run for of in comparable(read_runs()).values() for run in of]
    for is_split in (True, False):
        run = next(run for run in runs if run.is_split is is_split)
        found = estimates(run)
        assert found
        assert all(min(*one.means, one.rate) > 0 for one in found)
