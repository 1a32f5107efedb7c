"""The predictors against a known machine, and what the gate decides."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from banaserve.kvstore.client.cost_gate import (
    ComputePredictor,
    CostGate,
    FetchPredictor,
    FetchWork,
    GateDecision,
    HeldPrefix,
    StepBeside,
    Verdict,
)
from depth import chosen_seed

FIXED_S, TOKEN_S, PAIR_S = 0.02, 0.004, 2e-6


def machine(work: FetchWork) -> float:
    return FIXED_S + TOKEN_S * work.tokens + PAIR_S * work.attended


def share(work: FetchWork) -> float:
    return machine(work) - FIXED_S


def total(parts: list[FetchWork]) -> FetchWork:
    added = FetchWork()
    for part in parts:
        added += part
    return added


def plain(draw: random.Random) -> FetchWork:
    return FetchWork.of(draw.randint(64, 2048), draw.choice([0, 0, 512, 2048]))


def with_decodes(draw: random.Random) -> FetchWork:
    decodes = [FetchWork.of(1, draw.randint(50, 3000)) for _ in range(draw.randint(0, 30))]
    return total([*decodes, FetchWork.of(draw.randint(64, 512), draw.choice([0, 128, 512]))])


def test_work_counts_each_pair_once() -> None:
    assert FetchWork.of(4, 0) == FetchWork(4, 1 + 2 + 3 + 4)
    assert FetchWork.of(2, 10) == FetchWork(2, 11 + 12)
    assert FetchWork.of(2, 0) + FetchWork.of(2, 2) == FetchWork.of(4, 0)


@pytest.mark.parametrize("passes", [plain, with_decodes])
@pytest.mark.parametrize("held_up_every", [0, 10])
def test_learns_the_machine(
    passes: Callable[[random.Random], FetchWork], held_up_every: int
) -> None:
    draw, predictor = random.Random(chosen_seed(7)), ComputePredictor()
    for number in range(200):
        work = passes(draw)
        slow = 6.0 if held_up_every and number % held_up_every == 0 else 1.0
        assert predictor.observe(work, machine(work) * draw.uniform(0.95, 1.05) * slow)
    for work in (
        FetchWork.of(128, 0),
        FetchWork.of(512, 256),
        FetchWork.of(256, 1024),
        FetchWork.of(1024, 0),
    ):
        assert predictor.predict_share(work) == pytest.approx(share(work), rel=0.12)
        assert predictor.predict_pass(work) == pytest.approx(machine(work), rel=0.12)


def test_passes_that_are_all_alike_tell_the_price_of_a_token() -> None:
    predictor = ComputePredictor()
    work = FetchWork.of(512, 0)
    for _ in range(20):
        predictor.observe(work, machine(work))
    assert predictor.predict_share(FetchWork.of(128, 0)) == pytest.approx(
        machine(work) / 4, rel=0.03
    )


@pytest.mark.parametrize(
    "passes", [[(70, 0.30), (104, 0.20)], [(70, 0.30), (104, 0.20), (90, 0.25)], [(64, 9.0)] * 2]
)
def test_few_passes_some_of_them_held_up_do_not_make_computing_free(
    passes: list[tuple[int, float]],
) -> None:
    """Or an instance under load would compute what it was sent to fetch."""
    predictor = ComputePredictor()
    for tokens, seconds in passes:
        predictor.observe(FetchWork.of(tokens, 0), seconds)
    shares = [predictor.predict_share(FetchWork.of(n, 0)) for n in (128, 1024)]
    per_token_s = [seconds / tokens for tokens, seconds in passes]
    for share_s, num_tokens in zip(shares, (128, 1024), strict=True):
        assert min(per_token_s) <= share_s / num_tokens * 1.001


def test_follows_a_machine_that_became_slower() -> None:
    draw, predictor = random.Random(chosen_seed(1)), ComputePredictor()
    for factor in (1.0, 3.0):
        for _ in range(100):
            work = plain(draw)
            predictor.observe(work, factor * machine(work))
    work = FetchWork.of(512, 512)
    assert predictor.predict_share(work) == pytest.approx(3 * share(work), rel=0.1)


def test_a_prediction_is_never_negative() -> None:
    draw, predictor = random.Random(chosen_seed(5)), ComputePredictor()
    for _ in range(300):
        predictor.observe(plain(draw), draw.uniform(0.001, 5.0))
        for work in (FetchWork.of(1, 0), FetchWork.of(1, 100_000), FetchWork.of(4096, 0)):
            predicted = predictor.predict_share(work)
            assert predicted is None or predicted >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_times_that_cannot_be_are_not_learned(seconds: float) -> None:
    predictor = ComputePredictor()
    assert not predictor.observe(FetchWork.of(128, 0), seconds)
    assert not predictor.observe(FetchWork.of(8, 0), 0.1)
    assert predictor.predict_pass(FetchWork.of(128, 0)) is None


def test_fetches_are_predicted_by_the_median_of_the_last() -> None:
    predictor = FetchPredictor()
    assert predictor.predict(3) is None
    for blocks, seconds in [(4, 0.4), (1, 0.1), (2, 20.0), (0, 1.0), (3, math.inf)]:
        predictor.observe(blocks, seconds)
    assert predictor.predict(3) == pytest.approx(0.3)
    for _ in range(64):
        predictor.observe(1, 0.5)
    assert predictor.predict(1) == pytest.approx(0.5)


def taught(block_fetch_s: float, **options: object) -> CostGate:
    gate = CostGate(**options)  # type: ignore[arg-type]
    for tokens in (128, 256, 512, 1024):
        gate.compute.observe(FetchWork.of(tokens, 0), 0.001 * tokens)
    gate.fetch.observe(1, block_fetch_s)
    return gate


BLOCK = HeldPrefix(num_blocks=1, block_tokens=128, num_tokens=128)
EIGHT = HeldPrefix(num_blocks=8, block_tokens=128, num_tokens=1024, num_after=128)


def test_fetches_before_anything_is_measured() -> None:
    assert CostGate().decide(BLOCK) == Verdict(GateDecision.UNMEASURED, 1)
    assert CostGate().block_budget_s(1, BLOCK.work) == 0.0


@pytest.mark.parametrize(
    ("block_fetch_s", "decision"), [(0.01, GateDecision.FETCH), (0.3, GateDecision.COMPUTE)]
)
def test_the_cheaper_way_is_taken(block_fetch_s: float, decision: GateDecision) -> None:
    verdict = taught(block_fetch_s).decide(BLOCK)
    assert verdict.decision is decision
    assert verdict.fetch_s == pytest.approx(block_fetch_s)
    assert verdict.compute_s == pytest.approx(0.128, rel=0.1)
    assert verdict.fetched_blocks == (decision is GateDecision.FETCH)


@pytest.mark.parametrize(
    ("block_fetch_s", "decision", "fetched_blocks"),
    [
        (0.01, GateDecision.FETCH, 8),
        # Four in 0.56 s, behind five that are computed in 0.64 s; five would take 0.7 s.
        (0.14, GateDecision.CUT, 4),
        (0.6, GateDecision.CUT, 1),
        (40.0, GateDecision.COMPUTE, 0),
    ],
)
def test_of_a_long_prefix_as_much_is_fetched_as_hides_behind_computing_the_rest(
    block_fetch_s: float, decision: GateDecision, fetched_blocks: int
) -> None:
    verdict = taught(block_fetch_s, num_layers=30).decide(EIGHT)
    assert (verdict.decision, verdict.fetched_blocks) == (decision, fetched_blocks)
    assert verdict.fetch_s == pytest.approx(8 * block_fetch_s)
    assert verdict.compute_s == pytest.approx(1.024, rel=0.1)
    assert verdict.spared_s == pytest.approx(0.128 * fetched_blocks, rel=0.1)
    # Within what the fit makes of it, the step is as long as the longer of the two, or a bit more.
    longer_s = max(fetched_blocks * block_fetch_s, 0.128 * (9 - fetched_blocks))
    assert verdict.step_s == pytest.approx(longer_s, rel=0.1)


def test_without_layers_it_is_all_or_nothing() -> None:
    """What is fetched before the pass begins hides behind nothing."""
    decisions = [taught(s).decide(EIGHT).fetched_blocks for s in (0.01, 0.1, 0.12, 0.14, 0.6)]
    assert decisions == [8, 8, 8, 0, 0]


def test_a_prefix_that_was_handed_over_is_fetched_whole() -> None:
    gate = taught(0.6, num_layers=30)
    assert gate.decide(EIGHT).decision is GateDecision.CUT
    verdict = gate.decide(EIGHT, handed_over=True)
    assert (verdict.decision, verdict.fetched_blocks) == (GateDecision.FETCH, 8)


def test_what_others_compute_in_the_step_hides_a_fetch_and_what_they_fetch_delays_it() -> None:
    gate = taught(0.14, num_layers=30)
    busy = StepBeside(FetchWork.of(1024, 0))
    assert gate.decide(EIGHT, busy).fetched_blocks == 8
    fetching = StepBeside(FetchWork.of(1024, 0), fetched_blocks=8)
    assert gate.decide(EIGHT, fetching).fetched_blocks == 4


def test_a_refused_tier_is_tried_again_once_in_a_while() -> None:
    gate = taught(0.3, probe_every=4)
    verdicts = [gate.decide(BLOCK) for _ in range(8)]
    decisions = [verdict.decision for verdict in verdicts]
    assert decisions == [*[GateDecision.COMPUTE] * 3, GateDecision.PROBE] * 2
    assert [verdict.fetched_blocks for verdict in verdicts] == [0, 0, 0, 1] * 2


def test_a_gate_that_is_off_fetches() -> None:
    gate = taught(0.3, enabled=False)
    assert gate.decide(BLOCK).decision is GateDecision.FETCH
    assert gate.block_budget_s(1, BLOCK.work) == 0.0


def test_a_tier_may_take_what_computing_takes_less_the_copy_from_the_pool() -> None:
    work = FetchWork.of(256, 0)
    assert taught(0.01).block_budget_s(2, work) == pytest.approx(0.128 - 0.01, rel=0.1)
    assert 0 < taught(9.0).block_budget_s(2, work) < 1e-6
    assert taught(0.01).block_budget_s(0, FetchWork()) == 0.0
