"""Reports: every step counts, and short ones are learnt from together."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, SchedulerStats

from banaserve.base.types import BackPressure, InstanceId
from banaserve.serving.monitoring.leg_stats import never_below_zero
from banaserve.serving.monitoring.reports import ReportBoard

STEP_S = 0.005


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def a_step(step_s: float = STEP_S) -> SchedulerStats:
    counted = {
        "busy_seconds": step_s,
        "steps": 1.0,
        "step_decode_requests": 2.0,
        "step_context_tokens": 100.0,
    }
    return SchedulerStats(num_running_reqs=2, kv_connector_stats=counted)


def ran(clock: Clock, board: ReportBoard, count: int, step_s: float) -> None:
    for _ in range(count):
        clock.now_s += step_s
        board.record(a_step(step_s))


def test_short_steps_are_learnt_from_together() -> None:
    clock = Clock()
    board = ReportBoard(InstanceId("d0"), clock, 2048)
    ran(clock, board, 1000, STEP_S)
    fit = board.meter.model
    assert 50 <= fit.num_samples <= 101
    assert board.meter.step_s == pytest.approx(STEP_S)
    assert board.meter.step_tokens == pytest.approx(2.0)
    assert fit.error_fraction < 0.02
    assert board.last is not None
    assert board.last.num_running == 2
    assert board.last.busy_fraction == pytest.approx(1.0, abs=0.1)


def test_long_steps_are_learnt_from_one_by_one() -> None:
    clock = Clock()
    board = ReportBoard(InstanceId("d0"), clock, 2048)
    ran(clock, board, 30, 0.06)
    assert board.meter.model.num_samples == 30


def test_the_last_steps_before_a_pause_are_not_lost() -> None:
    clock = Clock()
    board = ReportBoard(InstanceId("d0"), clock, 2048)
    ran(clock, board, 4, STEP_S)
    assert board.meter.model.num_samples == 1
    clock.now_s += 1.0
    board.answered(idle=True)
    assert board.meter.model.num_samples == 2
    board.answered(idle=True)
    assert board.meter.model.num_samples == 2
    assert board.last is not None
    assert board.last.num_running == 0


def test_a_report_is_of_the_time_at_which_the_engine_spoke() -> None:
    clock = Clock()
    board = ReportBoard(InstanceId("d0"), clock, 2048)
    assert board.last is None
    stats = a_step()
    stats.num_running_reqs, stats.num_waiting_reqs, stats.num_skipped_waiting_reqs = 3, 1, 1
    stats.kv_cache_usage = 0.25
    board.record(stats)
    spoke_s = clock.now_s
    clock.now_s += 1.5
    last = board.last
    assert last is not None
    assert (last.at_s, last.num_running, last.num_waiting) == (spoke_s, 3, 2)
    assert last.kv_used_fraction == 0.25
    board.answered(idle=False)
    assert board.last is not None
    assert (board.last.at_s, board.last.num_running) == (clock.now_s, 3)


def test_what_waits_for_room_in_the_store_is_in_the_report_while_it_waits() -> None:
    clock = Clock()
    board = ReportBoard(InstanceId("p0"), clock, 2048)
    waits = {"room_prompts": 2.0, "room_tokens": 900.0, "room_longest_s": 0.5}
    store = {"room_held_blocks": 7.0, "room_blocks": 8.0, "room_block_bytes": 4096.0}
    board.record(SchedulerStats(kv_connector_stats={**waits, **store}))
    board.record(
        SchedulerStats(kv_connector_stats={"room_longest_s": 1.0, "room_wait_seconds": 2.0})
    )
    pressure = BackPressure(2, 900, 1.5, 7, 8, 4096)
    assert board.last is not None
    assert (board.last.back_pressure, pressure.held_bytes) == (pressure, 7 * 4096)
    assert board.room_wait_s == 2.0
    assert value("banaserve_prompts_waiting_for_room") == 2
    board.answered(idle=False)
    assert board.last.back_pressure == pressure
    board.answered(idle=True)
    assert (board.last.back_pressure, value("banaserve_prompts_waiting_for_room")) == (None, 0)
    ended = {name: -amount for name, amount in {**waits, **store}.items()}
    board.record(SchedulerStats(kv_connector_stats=ended))
    assert board.last.back_pressure is None


def value(name: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"instance_id": "p0"})


def test_a_first_token_from_elsewhere_makes_no_time_negative() -> None:
    """It came before the engine that ends the request had scheduled it."""
    times = {"queued_time": -0.2, "prefill_time": -0.1, "decode_time": 0.5, "inference_time": 0.4}
    finished = FinishedRequestStats(finish_reason=FinishReason.LENGTH, e2e_latency=0.9, **times)
    never_below_zero(finished)
    assert (finished.queued_time, finished.prefill_time) == (0.0, 0.0)
    assert (finished.decode_time, finished.inference_time, finished.e2e_latency) == (0.5, 0.4, 0.9)
