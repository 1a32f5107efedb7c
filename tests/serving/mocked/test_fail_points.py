"""A store, a parent of engines and engines fail at chosen points, two in one run, under streams.

The points that mock engines come by; ``live/test_fail_points.py`` has the others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asked_again import AskedAgain
from banaserve.base.platform.fail_points import VARIABLE, FailPoint
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until, writer
from streams import Answer, asked_all, back, greedy

pytestmark = [pytest.mark.room, pytest.mark.usefixtures("disarmed")]

NUM_STREAMS = 4
KINDS = greedy(12, 0, num_tokens=60)
INSTANCES = ("p0", "d0", "d1")
MOST_ROUNDS = 4
POINTS = (FailPoint.STORE_BEFORE_REPLY, FailPoint.LAUNCHER_ORDER, FailPoint.ENGINE_START)


@pytest.fixture
def server(serve: Callable[..., MockRun], points: Path) -> Iterator[MockRun]:
    """One for each test: an instance that ends too often in five minutes is given up."""
    run = serve("--pd", "1:2", mocks=MockOptions(step_ms=4.0), env={VARIABLE: str(points)})
    yield run
    assert run.end() == 0


@pytest.fixture
def expected(server: MockRun) -> list[Answer]:
    answers = list(asyncio.run(asked_all(server, KINDS)).values())
    assert {(one.error, one.num_tokens) for one in answers} == {("", 60)}
    return answers


def is_whole(server: MockRun) -> bool:
    return server.is_ready(*INSTANCES) and server.metric("banaserve_kvstore_up") == 1


def fail_all(server: MockRun, points: Path) -> None:
    """Bring the server by every point until all that are armed have failed.

    A failure may keep a process from the other point: it is come by once more.
    """
    for _ in range(MOST_ROUNDS):
        for victim in ("d1", "kvstore"):
            until(lambda: is_whole(server), "all serve")
            pid = writer(server.run_dir, victim)
            os.kill(pid, signal.SIGKILL)
            back(server, victim, pid)
        until(lambda: is_whole(server), "all serve")
        if not any(points.iterdir()):
            return
    raise AssertionError(f"nobody came by {[path.name for path in points.iterdir()]}")


@pytest.mark.parametrize(("one", "other"), [*itertools.combinations(POINTS, 2)])
def test_two_failures_change_no_answer(
    server: MockRun, points: Path, expected: list[Answer], one: FailPoint, other: FailPoint
) -> None:
    until(lambda: is_whole(server), "all serve")
    with AskedAgain(server, list(KINDS.values()), NUM_STREAMS) as streams:
        streams.comes_to(NUM_STREAMS)
        for point in (one, other):
            (points / point).write_text("kill")
        fail_all(server, points)
        streams.goes_on()
    assert [answer.error for _, answer in streams.answers if answer.error] == []
    assert [answer for _, answer in streams.answers] == [expected[n] for n, _ in streams.answers]
