"""Streams leave an overloaded instance by themselves, once others of its role serve again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.trace_events import LegBegan, LegEnded, LegFailed
from banaserve.frontdoor.admin_client import AdminClient
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until
from streams import Answer, Kind, asked_all, differences, greedy

pytestmark = pytest.mark.deep

NUM_STREAMS = 24
KINDS = greedy(NUM_STREAMS, 0, num_tokens=600)
DECODE = ("d0", "d1", "d2")
OTHERS = DECODE[1:]


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "1:3", "--rebalance", mocks=MockOptions(step_ms=2.0, request_ms=1.0))
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def admin(server: MockRun) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


def held(server: MockRun) -> dict[str, float]:
    return {n: server.metric("banaserve_requests_in_flight", instance_id=n) for n in DECODE}


def asked_while(
    server: MockRun, kinds: dict[str, Kind], act: Callable[[], None]
) -> dict[str, Answer]:
    """Answers of streams under which something is done, once all of them have begun."""

    async def asked() -> dict[str, Answer]:
        begun: set[int] = set()
        all_begin = asyncio.Event()

        def seen(answer: Answer) -> None:
            begun.add(id(answer))
            if len(begun) == len(kinds):
                all_begin.set()

        asking = asyncio.create_task(asked_all(server, kinds, seen))
        await all_begin.wait()
        await asyncio.to_thread(act)
        return await asking

    return asyncio.run(asked())


def test_streams_of_one_go_to_others_that_serve_again(server: MockRun, admin: AdminClient) -> None:
    expected = asyncio.run(asked_all(server, KINDS))
    for name in OTHERS:
        admin.drain(name)
    until(lambda: sum(held(server).values()) == 0, "all have ended")
    moved_before = server.metric("banaserve_streams_rebalanced_total")

    def serve_again() -> None:
        # The first token of a stream may come before its decode leg is counted.
        until(lambda: held(server) == {"d0": NUM_STREAMS, "d1": 0, "d2": 0}, "d0 has all")
        for name in OTHERS:
            admin.release(name)

    answers = asked_while(server, KINDS, serve_again)
    assert differences(KINDS, expected, answers) == {}
    moved = server.metric("banaserve_streams_rebalanced_total") - moved_before
    assert moved >= NUM_STREAMS // 2
    num_moves, legs = 0, list[tuple[float, int, str]]()
    for summary in admin.requests(NUM_STREAMS):
        at_s = []
        for line in admin.trace(summary.id).lines:
            match line.event:
                case LegBegan(leg="decode", instance=name):
                    legs.append((line.at_s, 1, name))
                case LegEnded(leg="decode", instance=name):
                    legs.append((line.at_s, -1, name))
                case LegFailed(instance=name, why="rebalanced"):
                    legs.append((line.at_s, -1, name))
                    at_s.append(line.at_s)
        assert all(after - before >= 10.0 for before, after in pairwise(at_s))
        num_moves += len(at_s)
    assert num_moves == moved
    now, most = Counter[str](), list[int]()
    for _, sign, name in sorted(legs):
        now[name] += sign
        if now.total() == NUM_STREAMS:
            most.append(max(now.values()))
    assert min(most) <= 1.3 * NUM_STREAMS / 3, "all of them had their share"
