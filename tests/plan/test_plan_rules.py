"""Rules of `banaserve plan`: gain, verdict, flip points, loads; nothing is simulated."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.costs.profile import ErrorSection, load
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.search.candidates import (
    Candidate,
    colocated,
    elastic,
    fixed_candidates,
    split,
)
from banaserve_bench.plan.search.flips import find_flips
from banaserve_bench.plan.search.gain import (
    MOST_RATIO,
    Answer,
    Gain,
    GoodputRuns,
    answer,
    gain,
    ratio_interval,
)
from banaserve_bench.plan.search.loads import feasible_share, longer, read_loads
from banaserve_bench.plan.search.trial import StepError, scenarios
from banaserve_bench.results.statistics import mean_interval
from banaserve_bench.simulation.job import AskedSystem, job
from depth import chosen_seed, says_seed

PROFILE = load("llama-3.1-8b-h100")
LIMITS = LatencyLimits(1.0, 0.05)
EXACT = GoodputRuns([0.9] * 3, [0.9] * 3, [0.9] * 3)


def _gain(own: GoodputRuns, other: GoodputRuns) -> Gain:
    return gain(own, other, [1000] * len(own.predicted))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        # Equal, worse, and better by less than what pays.
        ([[0.9] * 3] * 3, [[0.9] * 3] * 3, Answer.NO),
        ([[0.5] * 3] * 3, [[0.9] * 3] * 3, Answer.NO),
        ([[0.92] * 3] * 3, [[0.9] * 3] * 3, Answer.NO),
        # Clearly better, at any step times and load.
        ([[0.9] * 3] * 3, [[0.6, 0.61, 0.6]] * 3, Answer.YES),
        # Better as predicted, but not if step times are wrong in opposite directions.
        ([[0.6] * 3, [0.9] * 3, [0.95] * 3], [[0.4] * 3, [0.6] * 3, [0.7] * 3], Answer.CANNOT_TELL),
        # Better in the mean, but the loads differ.
        ([[0.9, 0.3, 0.9]] * 3, [[0.5, 0.6, 0.5]] * 3, Answer.CANNOT_TELL),
        # The other one serves no request.
        ([[0.9] * 3] * 3, [[0.0] * 3] * 3, Answer.YES),
        ([[0.0] * 3] * 3, [[0.0] * 3] * 3, Answer.NO),
    ],
)
def test_the_verdict_follows_from_the_interval(
    own: list[list[float]], other: list[list[float]], expected: Answer
) -> None:
    assert answer(_gain(GoodputRuns(*own), GoodputRuns(*other)), True) is expected


def test_the_interval_of_a_ratio_has_1_where_the_mean_difference_may_be_0() -> None:
    draws = Random(3)
    seen = set()
    for _ in range(60):
        above = [draws.uniform(0, 10) for _ in range(4)]
        below = [draws.uniform(0, 6) for _ in range(4)]
        low, _, high = mean_interval([a - b for a, b in zip(above, below, strict=True)])
        found = ratio_interval(above, below)
        assert (found.low <= 1 <= found.high) == (low <= 0 <= high)
        seen.add(found.low <= 1 <= found.high)
    assert seen == {True, False}
    assert ratio_interval([2.0, 2.2], [1.0, 1.1]) == pytest.approx((2, 2, 2))
    assert ratio_interval([5.0, 6.0], [0.5, 6.0]).high == MOST_RATIO


def test_without_a_known_error_there_is_no_verdict() -> None:
    better = _gain(EXACT, GoodputRuns([0.1] * 3, [0.1] * 3, [0.1] * 3))
    assert better.whole.low > 5
    assert answer(better, False) is Answer.CANNOT_TELL


def test_it_is_never_yes_where_the_interval_has_1() -> None:
    seed = chosen_seed(7)
    with says_seed(seed):
        _check_verdicts(Random(seed))


def _check_verdicts(draws: Random) -> None:
    answers = set()
    for _ in range(200):
        spread = draws.random() * 0.2
        found = _gain(_runs(draws, spread), _runs(draws, spread))
        told = answer(found, True)
        answers.add(told)
        whole = found.whole
        assert whole.low <= whole.estimate <= whole.high
        # What the errors of step times add makes the interval wider.
        assert whole.low <= found.of_loads.low
        assert found.of_loads.high <= whole.high
        assert not (told is Answer.YES and f"{whole.low:.2f}" <= "1.00")
        assert not (told is Answer.NO and whole.high >= 1.05)
    assert answers == set(Answer)


def _runs(draws: Random, spread: float) -> GoodputRuns:
    mean = draws.random()

    def drawn(shift: float) -> list[float]:
        found = (mean + shift + spread * (draws.random() - 0.5) for _ in range(4))
        return [min(1.0, max(0.0, one)) for one in found]

    return GoodputRuns(drawn(-spread), drawn(0.0), drawn(spread))


def test_the_error_of_ttft_beyond_that_of_steps_moves_its_limit() -> None:
    error = StepError.of(ErrorSection(0.1, 0.02, 0.03, ttft_p99=0.21))
    # Mean errors are exceeded by two of five; three of four are within 1.44 times as much.
    assert (error.step, error.ttft) == pytest.approx((0.0432, 0.3024))
    slow, told, fast = scenarios(LIMITS, StepError(0.1, 0.21))
    assert (slow.factor, told.factor) == (1.1, 1.0)
    assert fast.factor == pytest.approx(1 / 1.1)
    assert (slow.limits.ttft_s, fast.limits.ttft_s) == pytest.approx((1 / 1.1, 1.1))
    assert told.limits == LIMITS
    assert slow.limits.tpot_s == fast.limits.tpot_s == LIMITS.tpot_s


def test_flip_points_are_the_nearest_ones_on_both_sides() -> None:
    [below, above] = find_flips("tokens", 1000, lambda scale: 0.3 < scale < 5)
    assert below.low < 300 < below.high <= below.low * 1.1
    assert above.low < 5000 < above.high <= above.low * 1.1
    assert (below.pays_above, above.pays_above) == (True, False)
    [only] = find_flips("tokens", 1000, lambda scale: scale > 3)
    assert only.low < 3000 < only.high
    assert only.pays_above
    assert not find_flips("tokens", 1000, lambda scale: True)
    # What cannot be simulated ends the search.
    assert not find_flips("tokens", 1000, lambda scale: None if scale > 1 else False)


@pytest.mark.parametrize(
    "candidate",
    [
        colocated(3, store=False),
        colocated(3, 512, store=True),
        split(1, 2, 8192),
        elastic(3, PROFILE.name, LIMITS),
    ],
    ids=lambda one: one.name,
)
def test_the_command_line_of_a_candidate_starts_its_system(candidate: Candidate) -> None:
    system = candidate.system
    config = parse_serve_argv(["MODEL", *candidate.words])
    numbers = (config.prefill, config.decode, config.colocated)
    assert numbers == (system.prefill, system.decode, system.colocated)
    assert config.kv_store == (system.cache == "global")
    assert config.orchestrator.is_elastic == (system.migration == "elastic")
    steps = ("--max-num-batched-tokens", str(system.limits.step_tokens))
    assert config.orchestrator.is_elastic or config.vllm_argv == steps


def test_candidates_are_few_and_have_all_instances() -> None:
    for instances in (1, 2, 4, 64):
        found = fixed_candidates(instances, False, 8192)
        assert {len(one.system.roles()) for one in found} == {instances}
        assert len({one.name for one in found}) == len(found) <= 20
        assert any(not one.is_colocated for one in found) == (instances > 1)
    assert {one.step_tokens for one in fixed_candidates(4, False, 2048)} == {512, 2048}
    assert {one.has_store for one in fixed_candidates(1, True, 8192)} == {False, True}


def test_a_trace_is_cut_into_parts_and_a_distribution_is_drawn_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = (f'{{"t": {n}, "input_length": {n + 1}, "output_length": 2}}\n' for n in range(130))
    path.write_text("".join(rows))
    parts = read_loads(job(AskedSystem(target=str(path), profile=PROFILE.name)), range(3))
    assert parts.are_windows
    assert [rows[0].prompt_tokens for rows in (parts.first, *parts.others)] == [1, 33, 65, 97]
    assert {rows[0].at_s for rows in parts.others} == {0.0}
    drawn = read_loads(job(AskedSystem(target="alpaca", rps=5, duration_s=20)), range(3))
    assert not drawn.are_windows
    assert len({rows[0].at_s for rows in (drawn.first, *drawn.others)}) == 4


@pytest.mark.parametrize(
    ("second", "words"),
    [
        # A part that does not choose candidates judges them all the same.
        ('{{"t": {n}, "input_length": 9000, "output_length": 2}}', "longer than the context"),
        ('{{"t": 60, "input_length": 9, "output_length": 2}}', "arrive at once"),
    ],
    ids=["too long", "at once"],
)
def test_no_part_of_a_trace_may_be_too_long_or_take_no_time(
    second: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    first = '{{"t": {n}, "input_length": 9, "output_length": 2}}'
    lines = [(first if n < 60 else second).format(n=n) for n in range(120)]
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=words):
        read_loads(job(AskedSystem(target=str(path), profile="opt-13b-a100")), range(3))


def test_prompts_are_longer_within_the_context() -> None:
    rows = [Arrival(1.0, 100, 10, (1, 2)), Arrival(2.0, 900, 200)]
    assert longer(rows, 2.0, 1000) == [Arrival(1.0, 200, 10), Arrival(2.0, 800, 200)]


def test_limits_below_the_bound_of_an_idle_engine_are_refused() -> None:
    # 6.5 ms are fixed in the profile; a prompt of 1,000 tokens takes 36.6 ms.
    costs = StepCosts(PROFILE)
    rows = [Arrival(0.0, 1000, 10), Arrival(1.0, 10_000, 10)]
    assert feasible_share(rows, costs, LatencyLimits(0.04, 0.01)) == 0.5
    assert feasible_share(rows, costs, LatencyLimits(1.0, 0.01)) == 1.0
    with pytest.raises(UserError, match=r"--slo-ttft 0.03: an idle engine takes 0\.0366 s"):
        feasible_share(rows, costs, LatencyLimits(0.03, 0.01))
    with pytest.raises(UserError, match=r"--slo-tpot 0.005: an idle engine takes 0\.00658 s"):
        feasible_share(rows, costs, LatencyLimits(1.0, 0.005))
    # A prompt whose prefix is known may be cached.
    cached = [Arrival(0.0, 10_000, 10, (1,))]
    assert feasible_share(cached, costs, LatencyLimits(0.03, 0.01)) == 1.0
