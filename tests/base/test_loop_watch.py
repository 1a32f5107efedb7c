"""No time in which a loop has stood still counts against its peers, and none is kept for ever."""

from __future__ import annotations

import asyncio

import pytest

from banaserve.base.net.loop_watch import LEAST_STALL_S, LoopWatch, wait_first

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


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop that stands still for a while whenever it is told to, at once."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


async def later(num_turns: int) -> str:
    """An answer that has come, and takes some turns of the loop to be read."""
    for _ in range(num_turns):
        await asyncio.sleep(0)
    return "answer"


@pytest.mark.parametrize(("stall_s", "is_read"), [(12.0, True), (0.0, True), (None, False)])
def test_an_answer_that_has_come_during_a_stall_is_read(
    stall_s: float | None, is_read: bool
) -> None:
    async def asked(loop: SkippingLoop) -> bool:
        never: asyncio.Future[str] = loop.create_future()
        waiting = asyncio.ensure_future(wait_first({never}, 0.01))
        if stall_s is None:
            await waiting
            return never.done()
        answer = asyncio.ensure_future(later(5))
        waiting = asyncio.ensure_future(wait_first({answer}, 5.0))
        await asyncio.sleep(0)
        loop.skipped_s += stall_s
        await waiting
        return answer.done()

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        assert runner.run(asked(loop)) is is_read
