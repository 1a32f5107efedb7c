"""``bench pacing``: what is drawn, what is predicted, and what is made of the steps."""

from __future__ import annotations

import argparse

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load
from banaserve.pacing.step_log import PacedStep
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.results.result import ModelledTime
from benchmarks import pacing
from benchmarks.pacing import PacedRequest, PacedRun, draw, figures_of, predicted

PROFILE = load("opt-13b-a100")
TOLD = ModelledTime(PROFILE.name, PROFILE.source, 2.0, 3, 1, 0.0)


@pytest.mark.parametrize(
    "argv",
    [
        ["--prompt-tokens", "9", "3"],
        ["--output-tokens", "1", "3"],
        ["--requests", "0"],
        ["--pd", "2"],
        ["--profile", "nowhere", "--json", "/nowhere/x.json"],
        ["--rate", "0"],
    ],
)
def test_wrong_options_are_refused_before_anything_starts(argv):
    with pytest.raises(UserError):
        pacing.main(argv)


def test_the_same_seed_draws_the_same_requests():
    given = argparse.Namespace(
        seed=3, rate=5.0, requests=20, prompt_tokens=[4, 9], output_tokens=[2, 3]
    )
    asks = draw(given)
    assert asks == draw(given)
    assert {len(ask.prompt) for ask in asks} <= set(range(4, 10))
    assert {ask.output_tokens for ask in asks} == {2, 3}


def test_what_is_predicted_for_a_request_alone_is_the_time_of_its_steps():
    simulated = predicted(PROFILE, "1:1", [PacedRequest(0.0, [7] * 512, 3)])
    prefill_s = 18.10e-3 + 512 * 0.10191e-3 + 512**2 * 7.122e-9
    assert simulated["ttft_p50_s"] == pytest.approx(prefill_s)


def test_figures_are_in_modelled_seconds():
    records = [
        RequestRecord(id="0", sent_at_s=10.0, first_token_at_s=11.0, token_at_s=[11.0, 11.2, 11.4])
    ]
    steps = {
        "p0": [PacedStep(0, 0.5, 0.1, 0.5, 9, 0)],
        "d0": [PacedStep(0, 0.1, 0.05, 0.11, 0, 1), PacedStep(0.11, 0.1, 0.15, 0.15, 0, 1)],
        "d1": [],
    }
    run = PacedRun(2.0, records, steps, {"p0": 0.0, "d0": 0.5, "d1": 0.0}, TOLD)
    figures = figures_of(run, {"ttft_p50_s": 0.25, "tpot_p50_s": 0.1})
    medians = {name: samples for name, (samples, _) in figures.items()}
    assert medians["x2.ttft"] == [0.5]
    assert medians["x2.tpot"] == [pytest.approx(0.1)]
    assert medians["x2.ttft_vs_simulated"] == [2.0]
    assert medians["x2.overrun_fraction"] == [0.0, 0.5]
    assert medians["x2.step_error_median"] == [0.0, pytest.approx(0.3)]
    assert medians["x2.late_fraction"] == [pytest.approx(0.06 / 0.7)]
    assert medians["x2.work_fraction"] == [pytest.approx(0.3 / 0.7)]


def test_a_token_that_came_without_an_event_of_its_own_counts():
    record = RequestRecord(
        id="0",
        sent_at_s=10.0,
        first_token_at_s=11.0,
        token_at_s=[11.0, 11.2, 11.4],
        completion_tokens=5,
    )
    steps = {"d0": [PacedStep(0, 0.1, 0.05, 0.11, 0, 1)]}
    run = PacedRun(1.0, [record], steps, {"d0": 0.0}, TOLD)
    figures = figures_of(run, {"ttft_p50_s": 1.0, "tpot_p50_s": 0.1})
    assert figures["x1.tpot"][0] == [pytest.approx(0.1)]
    assert figures["x1.tpot_vs_simulated"][0] == [pytest.approx(1.0)]
