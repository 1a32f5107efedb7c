"""No time in which a loop has stood still counts against its peers, and none is kept for ever."""

from __future__ import annotations

import pytest

from banaserve.net.loop_watch import LEAST_STALL_S, LoopWatch

TICK_S = 0.1


def test_a_loop_that_runs_enforces_its_limits() -> None:
    watch = LoopWatch(TICK_S)
    for n in range(50):
        assert not watch.tick(100.0 + n * (TICK_S + 0.9 * LEAST_STALL_S))
        assert watch.may_enforce()


@pytest.mark.parametrize("stall_s", [LEAST_STALL_S + 0.01, 12.0])
def test_after_a_stall_limits_wait_once(stall_s: float) -> None:
    watch = LoopWatch(TICK_S)
    watch.tick(100.0)
    assert watch.tick(100.0 + TICK_S + stall_s)
    assert watch.lag_s == pytest.approx(stall_s)
    assert not watch.tick(100.0 + 2 * TICK_S + stall_s)
    assert [watch.may_enforce() for _ in range(3)] == [False, True, True]


def test_one_that_stands_still_again_and_again_enforces_them_every_other_time() -> None:
    watch, now_s, may = LoopWatch(TICK_S), 0.0, []
    for _ in range(8):
        now_s += 5.0
        watch.tick(now_s)
        may.append(watch.may_enforce())
    assert may == [True, False, True, False, True, False, True, False]
