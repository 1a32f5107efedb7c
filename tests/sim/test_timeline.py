"""Virtual time: order, jumps, and asyncio code that runs in it."""

from __future__ import annotations

import asyncio

import pytest

from banaserve.base.clock import Clock
from banaserve.sim.timeline import Timeline
from virtual_time import run_virtual


class VirtualClock:
    """The ``Clock`` of a timeline; ``sleep`` works inside ``run_virtual``."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def now(self) -> float:
        return self._timeline.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def test_events_happen_in_the_order_of_time_and_then_of_entry() -> None:
    timeline = Timeline()
    seen: list[tuple[float, str]] = []

    def note(what: str) -> None:
        seen.append((timeline.now_s, what))
        if what == "b":
            timeline.after(0.0, note, "b's child")
            timeline.at(0.5, note, "too late, so at once")

    for at_s, what in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (9.0, "far")):
        timeline.at(at_s, note, what)
    timeline.run(until_s=5.0)
    assert seen == [
        (1.0, "a"),
        (1.0, "b"),
        (1.0, "b's child"),
        (1.0, "too late, so at once"),
        (2.0, "c"),
    ]
    assert timeline.now_s == 5.0
    timeline.run()
    assert seen[-1] == (9.0, "far")
    assert timeline.num_events == 6


def test_a_coroutine_sleeps_for_hours_in_no_time() -> None:
    timeline = Timeline()
    clock: Clock = VirtualClock(timeline)

    async def controller() -> list[float]:
        times = []
        for _ in range(1000):
            await clock.sleep(3600.0)
            times.append(clock.now())
        return times

    times = run_virtual(timeline, controller())
    assert times == [3600.0 * (n + 1) for n in range(1000)]


def test_coroutines_and_events_share_one_order_of_time() -> None:
    timeline = Timeline()
    clock = VirtualClock(timeline)
    seen: list[tuple[float, str]] = []
    for n in range(4):
        timeline.at(n + 0.5, lambda what: seen.append((timeline.now_s, what)), "event")

    async def sleeper() -> None:
        for _ in range(3):
            await clock.sleep(1.0)
            seen.append((clock.now(), "sleeper"))

    async def both() -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(sleeper(), sleeper())

    run_virtual(timeline, both())
    assert [at_s for at_s, _ in seen] == sorted(at_s for at_s, _ in seen)
    assert [what for _, what in seen].count("sleeper") == 6
    assert seen[0] == (0.5, "event")
    assert seen[1:3] == [(1.0, "sleeper")] * 2


def test_an_event_wakes_a_coroutine_that_waits_for_it() -> None:
    timeline = Timeline()

    async def main() -> float:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        timeline.at(7.0, future.set_result, "done")
        timeline.at(8.0, lambda _: pytest.fail("time went on while somebody was awake"))
        assert await future == "done"
        return loop.time()

    assert run_virtual(timeline, main()) == 7.0


def test_timeouts_are_virtual_too() -> None:
    timeline = Timeline()

    async def main() -> None:
        async with asyncio.timeout(30):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(timeline, main())
    assert timeline.now_s == 30.0


def test_waiting_for_nothing_is_an_error_and_no_hang() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never happens"):
        run_virtual(Timeline(), main())
