"""Processes fail at chosen points, two in one run: no answer is lost, doubled or changed.

Under streams an engine dies and comes back, layers go and come home, and the store is emptied of
what it holds in memory, so that every point is come by. Random weights, float32.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asked_again import AskedAgain
from banaserve.base.errors import UserError
from banaserve.base.platform.fail_points import VARIABLE, FailPoint
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from migration_load import bring_home
from observing import until, writer
from server_run import Run
from streams import Answer, Kind, asked, back, connected

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("disarmed")]

NUM_STREAMS = 4
OUTPUT_TOKENS = 32
PROMPT_TOKENS = 200
INSTANCES = ("p0", "d0", "d1")
LAYERS = MoveLayers("d0", "p0", (4, 12))

NUM_PROMPTS = 12
MOST_ROUNDS = 4

IN_MOVES = [
    *(FailPoint.MOVE_PREPARE, FailPoint.MOVE_PRECOPY, FailPoint.MOVE_COMMIT),
    *(FailPoint.GUEST_BUILD, FailPoint.GUEST_RUN, FailPoint.GUEST_ACTIVATE),
]


BETWEEN_STORES = [FailPoint.PEER_REQUEST, FailPoint.PEER_PUSH]
"""Only with several machines: ``tests/kvstore/test_kvstore_push.py`` tries them."""
HERE = [point for point in FailPoint if point not in BETWEEN_STORES]
WITHOUT_KV = {FailPoint.STORE_BEFORE_REPLY, FailPoint.LAUNCHER_ORDER, FailPoint.ENGINE_START}
"""``mocked/test_fail_points.py`` tries pairs of these alone."""


def pairs() -> list[object]:
    """Every two points that are not both without KV.

    A few of those in which each point is once or twice belong to every run.
    """
    others = [point for point in HERE if point not in IN_MOVES]
    left = others[len(IN_MOVES) :] + others[: len(others) % 2]
    usual = [*zip(IN_MOVES, others, strict=False), *zip(left[::2], left[1::2], strict=False)]
    unusual = [
        pair
        for pair in itertools.combinations(HERE, 2)
        if pair not in usual and pair[::-1] not in usual
    ]
    rare = [
        pair for pair in (*usual[:2], *usual[3::2], *unusual) if not WITHOUT_KV.issuperset(pair)
    ]
    return [
        *(pytest.param(*pair, id="-".join(pair)) for pair in usual[2::2]),
        *(pytest.param(*pair, id="-".join(pair), marks=pytest.mark.long) for pair in rare),
    ]


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Run], points: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Run]:
    disk = tmp_path_factory.mktemp("disk")
    run = serve(
        *("--pd", "1:2", "--dtype", "float32", "--max-model-len", "2048", "--migration-poison"),
        *("--kv-store-ssd", str(disk), "--kv-store-ssd-size", "1GiB"),
        env={VARIABLE: str(points)},
    )
    yield run
    assert run.end() == 0


def kinds_of(name: str) -> list[Kind]:
    """Requests of that name's own prompts, every other one drawn with a seed."""
    draws = random.Random(name)
    body = {
        "model": "smollm2-135m",
        "ignore_eos": True,
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    prompts = [draws.choices(range(100, 40_000), k=PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    drawn = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 1}]
    return [
        Kind("/v1/completions", {**body, "prompt": prompt, **drawn[number % 2]})
        for number, prompt in enumerate(prompts)
    ]


def is_whole(server: Run) -> bool:
    ready = all(
        server.metric("banaserve_instance_ready", instance_id=name) == 1 for name in INSTANCES
    )
    return ready and server.metric("banaserve_kvstore_up") == 1


def moved_there_and_back(admin: AdminClient) -> bool:
    """Whether both moves came to their end; a process that dies under them may end them."""
    with contextlib.suppress(UserError):
        return all(admin.run(ask).state == "done" for ask in (LAYERS, Return("d0")))
    return False


def fail_all(server: Run, admin: AdminClient, points: Path, again: Callable[[], None]) -> None:
    """Bring the server by every point until all that are armed have failed.

    A failure may keep a process from the other point: it is come by once more.

    Args:
        again: Asks what has been answered before.
    """
    for _ in range(MOST_ROUNDS):
        moved_there_and_back(admin)
        bring_home(admin, "d0")
        for victim in ("d1", "kvstore"):
            until(lambda: is_whole(server), "all serve")
            pid = writer(server.run_dir, victim)
            os.kill(pid, signal.SIGKILL)
            back(server, victim, pid)
        again()  # it lies on disk alone
        until(lambda: is_whole(server), "all serve")
        if not any(points.iterdir()):
            return
    raise AssertionError(f"nobody came by {[path.name for path in points.iterdir()]}")


@pytest.mark.parametrize(("one", "other"), pairs())
def test_two_failures_change_no_answer(
    server: Run, points: Path, one: FailPoint, other: FailPoint
) -> None:
    kinds = kinds_of(f"{one}-{other}")
    admin = AdminClient(*find_admin(server.run_dir))
    until(lambda: is_whole(server), "all serve")

    def again() -> None:
        server.post("/v1/completions", {**kinds[0].body, "stream": False})

    with AskedAgain(server, kinds, NUM_STREAMS) as streams:
        streams.comes_to(NUM_STREAMS)
        for point in (one, other):
            (points / point).write_text("kill")
        fail_all(server, admin, points, again)
        streams.goes_on()
    assert [answer.error for _, answer in streams.answers if answer.error] == []

    async def undisturbed() -> list[Answer]:
        async with connected(server) as client:
            asking = (asked(client, kind) for kind in kinds)
            return list(await asyncio.gather(*asking))

    expected = asyncio.run(undisturbed())
    assert [answer for _, answer in streams.answers] == [expected[n] for n, _ in streams.answers]
    bring_home(admin, "d0")
    assert moved_there_and_back(admin)
