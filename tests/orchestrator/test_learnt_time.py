"""Calibration finds the coefficients behind noisy samples and follows a change."""

from __future__ import annotations

import random

import pytest

from banaserve.orchestrator.control.model.learnt_time import (
    EASED_AFTER_S,
    LearntTime,
    StepWork,
    eased,
    fill_fraction,
    link_of,
    step_time,
    transfer_time,
)
from banaserve.orchestrator.control.model.moving import Link
from depth import chosen_seed

OPT_13B_A100 = (18.10e-3, 0.10191e-3, 7.122e-9, 6.269e-7, 0.03851e-3)
"""DistServe's fit, TP 1: the prefill's three and the decode's last two coefficients, in seconds."""


def sampled_work(draws: random.Random) -> StepWork:
    tokens = draws.randint(1, 4000) if draws.random() < 0.5 else 0
    return StepWork(tokens, tokens**2, draws.randint(1, 90), draws.randint(0, 60_000))


def true_s(work: StepWork) -> float:
    return sum(c * x for c, x in zip(OPT_13B_A100, work.features, strict=False))


def test_a_profile_predicts_what_the_fit_says() -> None:
    """1,000 tokens: 18.10 + 101.91 + 7.122 ms; batch 48 with 14,400: 18.10 + 9.03 + 1.85 ms."""
    model = step_time(*OPT_13B_A100)
    assert model.predict_s(StepWork(1000, 1000**2).features) == pytest.approx(0.127132)
    decode = StepWork(0, 0, 48, 14_400)
    assert model.predict_s(decode.features) == pytest.approx(0.02897584)
    assert fill_fraction(model, decode) == pytest.approx(1 - 18.10 / 28.97584, rel=1e-6)
    assert fill_fraction(model, StepWork()) == 0
    # A full step of 2,048 tokens has a fixed part too: 18.10 of 256.68 ms.
    full = StepWork(2048, 2048**2)
    assert fill_fraction(model, full) == pytest.approx(1 - 18.10 / 256.683, rel=1e-4)
    assert fill_fraction(model, full, full) == 1
    half = fill_fraction(model, StepWork(1000, 1000**2), full)
    assert half == pytest.approx((1 - 18.10 / 127.132) / (1 - 18.10 / 256.683), rel=1e-4)


def test_step_times_are_learnt_from_a_wrong_profile() -> None:
    draws = random.Random(chosen_seed(5))
    model = step_time(0.05, 2e-4, 1e-8, 1e-6, 1e-4)
    for _ in range(400):
        work = sampled_work(draws)
        model = model.observed(work.features, true_s(work) * draws.gauss(1, 0.03))
    assert model.coefficients[:2] == pytest.approx(OPT_13B_A100[:2], rel=0.1)
    unseen = [sampled_work(draws) for _ in range(50)]
    assert all(
        model.predict_s(work.features) == pytest.approx(true_s(work), rel=0.08) for work in unseen
    )
    assert model.error_fraction < 0.05


def test_a_bandwidth_that_halves_is_followed() -> None:
    draws = random.Random(chosen_seed(6))
    model = transfer_time(Link(1e9, sync_s=1e-3))
    for bytes_per_s in (25e9, 12e9):
        for _ in range(100):
            num_bytes = draws.randint(10**6, 10**9)
            took_s = (0.005 + num_bytes / bytes_per_s) * draws.gauss(1, 0.05)
            model = model.observed((1.0, num_bytes), took_s)
        link = link_of(model, hop_s=1e-5)
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.1)
        assert link.hop_s == 1e-5
        assert model.error_fraction < 0.1


def test_the_error_is_that_of_predictions_made_before() -> None:
    fit = LearntTime.of([1.0])
    assert fit.observed([1.0], 2.0).error_fraction == pytest.approx(0.5)
    wrong = transfer_time(Link(1e9)).observed((1.0, 10**9), 0.25)
    assert wrong.error_fraction == pytest.approx(3.0, rel=1e-3)


def test_what_is_not_seen_for_long_does_not_grow_unsure_without_bound() -> None:
    fit = LearntTime.of([1.0, 1.0])
    for _ in range(5000):
        fit = fit.observed([1.0, 0.0], 2.0)
    assert fit.coefficients == pytest.approx((2.0, 1.0))
    assert fit.covariance[1][1] <= 1.0 + 1e-9
    assert fit.observed([1.0, 1.0], 7.0).predict_s([1.0, 1.0]) == pytest.approx(7.0, rel=0.1)


def test_samples_that_are_no_measurements_are_refused() -> None:
    fit = LearntTime.of([1.0, 1.0])
    with pytest.raises(ValueError, match="not above 0"):
        fit.observed([1.0, 1.0], 0.0)
    with pytest.raises(ValueError, match="3 features for 2"):
        fit.observed([1.0, 1.0, 1.0], 1.0)
    with pytest.raises(ValueError, match="zero"):
        LearntTime.of([1.0, 0.0])


def test_what_a_slow_transfer_has_taught_fades_and_what_a_fast_one_has_stays() -> None:
    first = Link(200e6, sync_s=1.0)
    slow, fast = Link(1e6, sync_s=61.0, hop_s=1e-3), Link(1e9, sync_s=0.01)
    assert eased(slow, first, 0.0).sync_s == pytest.approx(61.0)
    half = eased(slow, first, EASED_AFTER_S)
    assert half.sync_s == pytest.approx(31.0)
    assert 1 / half.bytes_per_s == pytest.approx((1 / 1e6 + 1 / 200e6) / 2)
    assert half.hop_s == 1e-3
    assert eased(slow, first, 20 * EASED_AFTER_S).sync_s == pytest.approx(1.0, rel=1e-3)
    kept = eased(fast, first, 20 * EASED_AFTER_S)
    assert (kept.sync_s, kept.bytes_per_s) == pytest.approx((0.01, 1e9))
