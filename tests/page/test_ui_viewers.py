"""Viewers of the page: nothing is looked at without them, and a slow one skips pictures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from banaserve.contracts.control_api import (
    ControllerState,
    ControllerStatus,
    DecisionRecord,
    StepRecord,
    WantedStep,
)
from banaserve.frontdoor.page.records import Figures, MoveProgress, PageSnapshot
from banaserve.frontdoor.page.viewers import PageState, Viewers


class StepClock:
    """Goes on by one interval at each ``tick``; who sleeps waits for it."""

    def __init__(self) -> None:
        self._s = 0.0
        self._sleepers: list[asyncio.Future[None]] = []
        self.asked_s: list[float] = []

    def now(self) -> float:
        return self._s

    async def sleep(self, seconds: float) -> None:
        sleeper = asyncio.get_running_loop().create_future()
        self._sleepers.append(sleeper)
        self.asked_s.append(seconds)
        await sleeper

    async def tick(self) -> None:
        self._s += 1.0
        sleepers, self._sleepers = self._sleepers, []
        for one in sleepers:
            if not one.done():
                one.set_result(None)
        await settle()


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


class Server:
    """What is looked at; each look says how many there were."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.decisions: list[DecisionRecord] = []
        self.broken = False
        self.moves: list[MoveProgress] = []

    async def read_state(self) -> PageState:
        self.num_looks += 1
        if self.broken:
            raise RuntimeError("it cannot be seen")
        controller = ControllerStatus(ControllerState.RUNNING, "on", "repaired", 2.0)
        snapshot = PageSnapshot(float(self.num_looks), 0, 0, controller, [], self.moves, Figures())
        return PageState(snapshot, list(self.decisions))


def decision(number: int, *steps: WantedStep) -> DecisionRecord:
    return DecisionRecord(
        number, float(number), "on", "repaired", 0.1, False, "why", {}, {}, list(steps), []
    )


def told(event: bytes) -> tuple[str, float]:
    """Name of an event and the number that tells it: when of a snapshot, which of a decision."""
    name, data = event.decode().strip().split("\r\n")
    value = msgspec.json.decode(data.removeprefix("data: "))
    return name.removeprefix("event: "), value.get(
        "at_s" if name == "event: snapshot" else "number"
    )


class Rig:
    def __init__(self, max_viewers: int = 32) -> None:
        self.clock, self.server = StepClock(), Server()
        self.viewers = Viewers(self.server.read_state, self.clock, max_viewers=max_viewers)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    one = Rig()
    yield one
    one.viewers.close()
    await settle()


async def test_nobody_looks_where_there_is_no_viewer(rig):
    for _ in range(3):
        await rig.clock.tick()
    assert rig.server.num_looks == 0
    stream = rig.viewers.events()
    assert told(await anext(stream)) == ("snapshot", 1)
    await stream.aclose()
    for _ in range(3):
        await rig.clock.tick()
    assert (rig.server.num_looks, rig.viewers.num_viewers) == (1, 0)


async def test_one_look_serves_all_viewers(rig):
    streams = [rig.viewers.events() for _ in range(5)]
    first = [await anext(one) for one in streams]
    assert len({id(event) for event in first}) == 1, "it was encoded once"
    await rig.clock.tick()
    assert [told(await anext(one)) for one in streams] == [("snapshot", 2)] * 5
    assert rig.server.num_looks == 2
    for one in streams:
        await one.aclose()
    assert rig.viewers.num_viewers == 0


async def test_a_slow_viewer_skips_pictures_and_holds_nobody_up(rig):
    slow, quick = rig.viewers.events(), rig.viewers.events()
    assert told(await anext(slow)) == ("snapshot", 1)
    assert told(await anext(quick)) == ("snapshot", 1)
    for number in range(2, 50):
        await rig.clock.tick()
        assert told(await anext(quick)) == ("snapshot", number)
    assert told(await anext(slow)) == ("snapshot", 49), "the newest, and none of those before"
    await slow.aclose()
    await quick.aclose()


async def test_decisions_are_sent_when_they_change(rig):
    step = WantedStep("move layers", "layers", 1.0, 2.0, 60.0, {})
    rig.server.decisions = [decision(1), decision(2, step)]
    stream = rig.viewers.events()
    assert [told(await anext(stream)) for _ in range(3)] == [
        ("decision", 1),
        ("decision", 2),
        ("snapshot", 1),
    ]
    await rig.clock.tick()
    assert told(await anext(stream)) == ("snapshot", 2)
    # The control loop writes a step's result into the decision that is there.
    step.result = StepRecord("done", "", 1.0, 0, 0.0, 0, False)
    rig.server.decisions.append(decision(3))
    await rig.clock.tick()
    assert [told(await anext(stream)) for _ in range(3)] == [
        ("decision", 2),
        ("decision", 3),
        ("snapshot", 3),
    ]
    late = rig.viewers.events()
    assert [told(await anext(late))[1] for _ in range(4)] == [1, 2, 3, 3]
    await stream.aclose()
    await late.aclose()


async def test_a_viewer_that_is_cancelled_while_it_waits_is_forgotten(rig):
    stream = rig.viewers.events()
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert rig.viewers.num_viewers == 0
    before = rig.server.num_looks
    await rig.clock.tick()
    assert rig.server.num_looks == before


async def test_a_look_that_fails_ends_no_stream(rig, caplog):
    stream = rig.viewers.events()
    await anext(stream)
    rig.server.broken = True
    await rig.clock.tick()
    assert "the page could not be drawn" in caplog.text
    rig.server.broken = False
    await rig.clock.tick()
    assert told(await anext(stream)) == ("snapshot", 3)
    await stream.aclose()


async def test_it_looks_more_often_while_something_moves(rig):
    stream = rig.viewers.events()
    await anext(stream)
    for state in ("running", "done"):
        rig.server.moves = [MoveProgress("m1", "layers", state, "layers 0:4")]
        await rig.clock.tick()
    assert rig.clock.asked_s == [1.0, 0.25, 1.0]
    await stream.aclose()


async def test_the_end_is_told_to_all_and_to_those_that_come_later(rig):
    stream = rig.viewers.events()
    await anext(stream)
    rig.viewers.close()
    assert [one async for one in stream] == [b"event: end\r\ndata: {}\r\n\r\n"]
    late = rig.viewers.events()
    assert [one async for one in late] == [b"event: end\r\ndata: {}\r\n\r\n"]
    assert (rig.viewers.num_viewers, rig.server.num_looks) == (0, 1)


async def test_there_are_only_so_many_viewers():
    rig = Rig(max_viewers=2)
    streams = [rig.viewers.events() for _ in range(2)]
    assert not rig.viewers.is_full
    for one in streams:
        await anext(one)
    assert rig.viewers.is_full
    await streams[0].aclose()
    assert not rig.viewers.is_full
    await streams[1].aclose()
