"""Cuts of prefixes: never predicted to be worse than all or nothing, and monotone in bandwidth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.kvstore.client.cost_gate import (
    CostGate,
    FetchWork,
    GateDecision,
    HeldPrefix,
    PassCosts,
    StepBeside,
    best_cut,
    predict_steps,
)
from banaserve.orchestrator.control.costs.transfers import overlapped_s
from depth import num_examples

BLOCK_TOKENS = 16
LAYERS = st.integers(1, 80)
BLOCK_S = st.floats(1e-6, 10.0)
COSTS = st.builds(PassCosts, st.floats(0.0, 0.1), st.floats(1e-6, 1e-2), st.floats(0.0, 1e-6))


@st.composite
def prefixes(draw: st.DrawFn) -> HeldPrefix:
    num_blocks = draw(st.integers(1, 60))
    missing = draw(st.integers(0, BLOCK_TOKENS - 1))
    return HeldPrefix(
        num_blocks,
        BLOCK_TOKENS,
        num_blocks * BLOCK_TOKENS - missing,
        BLOCK_TOKENS * draw(st.integers(0, 20)),
        draw(st.integers(0, 500)),
    )


@st.composite
def besides(draw: st.DrawFn) -> StepBeside:
    work = FetchWork.of(draw(st.integers(0, 400)), draw(st.integers(0, 400)))
    return StepBeside(work, draw(st.integers(0, 20)), draw(st.integers(1, 2048)))


checked = settings(max_examples=num_examples(1000), deadline=None)


@checked
@given(prefixes(), COSTS, BLOCK_S, LAYERS, besides())
def test_a_cut_is_never_predicted_to_be_worse_than_all_or_nothing(
    prefix: HeldPrefix, costs: PassCosts, block_s: float, layers: int, beside: StepBeside
) -> None:
    steps_s = predict_steps(prefix, costs, block_s, layers, beside)
    assert steps_s.shape == (prefix.num_blocks + 1,)
    cut = best_cut(steps_s)
    assert steps_s[cut] <= min(steps_s[0], steps_s[-1]) * (1 + 1e-8)
    assert (steps_s[cut + 1 :] > steps_s[cut]).all()


@checked
@given(prefixes(), COSTS, st.lists(BLOCK_S, min_size=2, max_size=6), LAYERS, besides())
def test_over_a_faster_link_no_less_is_fetched(
    prefix: HeldPrefix, costs: PassCosts, blocks_s: list[float], layers: int, beside: StepBeside
) -> None:
    beside = StepBeside(beside.work, 0, beside.max_tokens)
    cuts = [
        best_cut(predict_steps(prefix, costs, block_s, layers, beside))
        for block_s in sorted(blocks_s)
    ]
    assert cuts == sorted(cuts, reverse=True)


@checked
@given(prefixes(), COSTS, BLOCK_S, LAYERS)
def test_a_step_is_the_pipeline_that_modelled_engines_and_the_simulator_run(
    prefix: HeldPrefix, costs: PassCosts, block_s: float, layers: int
) -> None:
    steps_s = predict_steps(prefix, costs, block_s, layers)
    for num_fetched in range(prefix.num_blocks + 1):
        brought = prefix.tokens_of(num_fetched)
        work = FetchWork.of(
            prefix.num_tokens - brought + prefix.num_after, prefix.num_before + brought
        )
        pass_s = costs.fixed_s + costs.token_s * work.tokens + costs.pair_s * work.attended
        expected = overlapped_s(num_fetched * block_s, pass_s, 0.0, layers)
        assert steps_s[num_fetched] == pytest.approx(expected)


@checked
@given(prefixes(), COSTS, BLOCK_S, st.integers(1, 200))
def test_a_prompt_of_several_steps_computes_the_same_in_all_of_them(
    prefix: HeldPrefix, costs: PassCosts, block_s: float, max_tokens: int
) -> None:
    """Where nothing is fetched, cutting it into steps adds what each step costs anyway."""
    whole = predict_steps(prefix, costs, block_s, 4)[0]
    cut = predict_steps(prefix, costs, block_s, 4, StepBeside(max_tokens=max_tokens))[0]
    num_steps = max(1, -(-(prefix.num_tokens + prefix.num_after) // max_tokens))
    assert cut == pytest.approx(whole + (num_steps - 1) * costs.fixed_s)


@checked
@given(prefixes(), st.floats(1e-4, 1e-2), BLOCK_S, LAYERS, besides())
def test_what_was_handed_over_is_fetched_whole(
    prefix: HeldPrefix, token_s: float, block_s: float, layers: int, beside: StepBeside
) -> None:
    gate = CostGate(num_layers=layers)
    for tokens in (128, 256):
        gate.compute.observe(FetchWork.of(tokens, 0), token_s * tokens)
    gate.fetch.observe(1, block_s)
    verdict = gate.decide(prefix, beside, handed_over=True)
    assert (verdict.decision, verdict.fetched_blocks) == (GateDecision.FETCH, prefix.num_blocks)


def test_splits_that_are_alike_fetch_most() -> None:
    assert best_cut(np.array([2.0, 1.0, 1.0 + 1e-12, 3.0])) == 2
