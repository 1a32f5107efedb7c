"""Mock engines die or stand still under 16 streams: no request hangs or goes wrong.

What a death leaves in the store is in ``live/test_faults.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import httpx
import pytest

from mock_core import DIES_AT
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until, writer
from streams import Answer, asked_all, back, differences, greedy

pytestmark = pytest.mark.deep

NUM_STREAMS = 16
KINDS = greedy(NUM_STREAMS, 0, num_tokens=150)
NAMES = ("p0", "p1", "d0", "d1")


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "2:2", "--engine-stall-timeout", "3", mocks=MockOptions(step_ms=5.0))
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def expected(server: MockRun) -> dict[str, Answer]:
    answers = asyncio.run(asked_all(server, KINDS))
    assert {(one.error, one.num_tokens) for one in answers.values()} == {("", 150)}
    return answers


def wrong_while(
    server: MockRun, expected: dict[str, Answer], *acts: Callable[[], object]
) -> dict[str, tuple[Answer, Answer]]:
    """Wrong answers of streams under which something is done each time that all have gone on."""

    def generated() -> float:
        return server.metric("vllm:generation_tokens_total")

    def wait_for(num_tokens: float) -> None:
        until(lambda: generated() >= num_tokens, "streams go on")

    # Counted from before the streams: who looks late may see their last tokens.
    before = generated()

    async def asked() -> dict[str, Answer]:
        asking = asyncio.create_task(asked_all(server, KINDS))
        for number, act in enumerate(acts, 1):
            await asyncio.to_thread(wait_for, before + 4 * NUM_STREAMS * number)
            await asyncio.to_thread(act)
        return await asking

    return differences(KINDS, expected, asyncio.run(asked()))


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("p0", signal.SIGKILL),
        ("d0", signal.SIGKILL),
        ("d1", signal.SIGSTOP),
        ("kvstore", signal.SIGKILL),
    ],
)
def test_a_death_under_load_breaks_no_answer(
    victim: str, number: signal.Signals, server: MockRun, expected: dict[str, Answer]
) -> None:
    pid = writer(server.run_dir, victim)
    assert not wrong_while(server, expected, lambda: os.kill(pid, number))
    # One that had nothing to do when it was struck is found out later than the streams end.
    back(server, victim, pid)
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    assert server.metric("banaserve_requests_in_flight") == 0
    until(lambda: server.metric("vllm:num_requests_running") == 0, "all engines have said so")


def test_two_ends_one_after_the_other_break_no_answer(
    server: MockRun, expected: dict[str, Answer]
) -> None:
    """The same streams are on both engines, and neither end is their doing."""
    first, second = writer(server.run_dir, "d0"), writer(server.run_dir, "d1")
    ends = (lambda: os.kill(first, signal.SIGTERM), lambda: os.kill(second, signal.SIGKILL))
    assert not wrong_while(server, expected, *ends)
    back(server, "d0", first)
    back(server, "d1", second)


def test_a_request_under_which_engines_die_is_given_up(server: MockRun) -> None:
    """Three engines die before its first token, and no fourth."""
    before = {name: writer(server.run_dir, name) for name in NAMES}
    body = {"model": "smollm2-135m", "prompt": "a", "max_tokens": 1, "vllm_xargs": {DIES_AT: 0}}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert answer.json()["error"]["code"] == "engines_died"
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    assert sum(writer(server.run_dir, name) != before[name] for name in NAMES) == 3


def test_answers_are_the_same_after_all_that(server: MockRun, expected: dict[str, Answer]) -> None:
    assert not wrong_while(server, expected)
