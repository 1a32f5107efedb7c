"""What a worker counts becomes busy time, fill and a model of step times."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from banaserve.engine.connector.scheduler_side.scheduler import work_of
from banaserve.orchestrator.control.model.learnt_time import StepWork, step_time
from banaserve.serving.monitoring.reports import StepMeter

TRUTH = step_time(0.02, 1e-3, 1e-7, 1e-6, 2e-3)


def counted(work: StepWork, steps: int = 1, waited_s: float = 0.0) -> dict[str, float]:
    return {
        "busy_seconds": steps * TRUTH.predict_s(work.features) + waited_s,
        "load_wait_seconds": waited_s,
        "steps": steps,
        "step_prefill_tokens": steps * work.prefill_tokens,
        "step_prefill_pairs": steps * work.prefill_pairs,
        "step_decode_requests": steps * work.decode_requests,
        "step_context_tokens": steps * work.context_tokens,
    }


@pytest.mark.parametrize(
    ("computes", "work"),
    [
        ([], None),
        ([(0, 100)], StepWork(100, 10_000)),
        ([(100, 50), (0, 2)], StepWork(52, 50 * 250 + 4)),
        ([(300, 1), (20, 1), (0, 10)], StepWork(10, 100, 2, 320)),
    ],
)
def test_the_work_of_a_step(computes, work):
    assert work_of(computes) == work


def test_coefficients_are_told_of_work_that_it_has_had():
    meter = StepMeter(512, 0.0)
    for number in range(40):
        assert bool(meter.coefficients) is (number >= 20)
        work = StepWork(decode_requests=1 + number % 7, context_tokens=50 + number)
        meter.record(counted(work), number * 0.1)
    fixed_s, token_s, pair_s, _, request_s, _ = meter.coefficients
    assert (token_s, pair_s) == (0.0, 0.0)
    assert fixed_s + 4 * request_s == pytest.approx(0.028, rel=0.05)
    for number in range(5):
        meter.record(counted(StepWork(100 + number, 10_000)), 10.0 + number)
    assert meter.coefficients[1] == pytest.approx(1e-3, rel=0.2)


def test_the_time_of_a_fetch_is_smoothed_over_fetches():
    meter = StepMeter(512, 0.0)
    assert meter.fetch_block_s == 0.0
    meter.record({"load_seconds": 0.4, "loaded_blocks": 100}, 1.0)
    assert meter.fetch_block_s == pytest.approx(0.004)
    meter.record({}, 2.0)
    meter.record({"load_seconds": 1.4, "loaded_blocks": 100}, 3.0)
    assert meter.fetch_block_s == pytest.approx(0.005)


def test_half_of_the_time_in_steps_is_half_busy():
    meter = StepMeter(512, 0.0)
    work = StepWork(decode_requests=1, context_tokens=50)
    step_s = TRUTH.predict_s(work.features)
    now_s = 0.0
    for _ in range(400):
        now_s += 2 * step_s
        meter.record(counted(work), now_s)
    assert meter.busy_fraction == pytest.approx(0.5, abs=0.01)
    assert meter.step_s == pytest.approx(step_s)
    assert meter.step_tokens == pytest.approx(1.0)
    meter.idle(now_s + 100)
    assert meter.busy_fraction == 0.0


def test_reports_that_are_read_together_count_all_the_same():
    meter = StepMeter(512, 0.0)
    now_s = 0.0
    for _ in range(200):
        now_s += 0.05
        for _ in range(5):
            meter.record({"busy_seconds": 0.01, "steps": 1, "step_decode_requests": 1}, now_s)
    assert meter.busy_fraction == pytest.approx(1.0, abs=0.01)
    meter.idle(now_s + 100)
    assert meter.busy_fraction < 0.01


def test_an_answer_before_the_report_of_a_long_step_is_no_idle_time():
    meter = StepMeter(512, 0.0)
    for number in range(1, 6):
        meter.idle(3.0 * number)
        meter.record({"busy_seconds": 3.0, "steps": 1, "step_prefill_tokens": 9}, 3.0 * number)
    assert meter.busy_fraction > 0.5


def test_steps_are_predicted_after_some_dozens_of_all_kinds():
    meter = StepMeter(512, 0.0)
    assert meter.fill_fraction == 1.0
    kinds = [StepWork(decode_requests=n, context_tokens=100 * n * n) for n in (1, 4, 16, 40)] + [
        StepWork(prefill_tokens=n, prefill_pairs=n * n) for n in (30, 100, 400)
    ]
    for number in range(140):
        work = kinds[number % len(kinds)]
        meter.record(counted(work, steps=1 + number % 3, waited_s=0.5), float(number))
    for work in kinds:
        assert meter.model.predict_s(work.features) == pytest.approx(
            TRUTH.predict_s(work.features), rel=0.05
        )
    assert meter.model.error_fraction < 0.05


def test_one_request_decoding_fills_a_step_little_and_a_full_prompt_wholly():
    def fill_of(work: StepWork) -> float:
        meter = StepMeter(512, 0.0)
        for number in range(60):
            other = StepWork(prefill_tokens=400, prefill_pairs=160_000)
            meter.record(counted(other if number < 30 else work), 10.0 * number)
        return meter.fill_fraction

    assert fill_of(StepWork(decode_requests=1, context_tokens=50)) < 0.2
    assert fill_of(StepWork(prefill_tokens=512, prefill_pairs=512**2)) == pytest.approx(1, abs=0.05)


def test_what_round_trips_to_guests_add_is_learnt_while_there_are_some():
    meter = StepMeter(512, 0.0)
    kinds = [StepWork(decode_requests=n, context_tokens=50 * n) for n in (1, 3, 9)]
    for number in range(60):
        meter.record(counted(kinds[number % 3]), float(number))
    assert meter.call_s is None
    meter.remote_calls = 30
    for number in range(60, 120):
        remote = counted(kinds[number % 3])
        meter.record({**remote, "busy_seconds": remote["busy_seconds"] + 30 * 0.001}, float(number))
    assert meter.call_s == pytest.approx(0.001, rel=0.1)
    assert meter.fill_fraction < 0.7  # waiting for guests is no work of this instance


def test_a_step_that_computes_nothing_teaches_nothing():
    meter = StepMeter(512, 0.0)
    meter.record({"busy_seconds": 0.001}, 1.0)
    assert meter.model.num_samples == 0
    assert meter.step_s == 0.0


def test_what_overlaps_is_told_once_steps_have_been_learnt() -> None:
    meter = StepMeter(2048, 0.0)
    assert meter.overlap_fraction(8) is None
    work = StepWork(prefill_tokens=1024, prefill_pairs=1024**2)
    for number in range(30):
        meter.record(counted(work), float(number))
    assert meter.overlap_fraction(1) == 0.0
    told = meter.overlap_fraction(8)
    assert told is not None
    assert 0.5 < told <= 1.0
