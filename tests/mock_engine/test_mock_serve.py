"""Servers with mock engines: streams, deaths, scaling, restarts and drains, in seconds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import ScaleRequest
from banaserve.contracts.restart_api import RestartRequest
from banaserve.frontdoor.admin_client import AdminClient
from fork_server import ForkServer
from mock_facts import MockOptions, Trouble
from mock_run import MockRun, mock_run
from observing import until, writer
from streams import Answer, Kind, asked_all, back, differences, greedy

pytestmark = pytest.mark.deep

MOCKS = MockOptions(step_ms=4.0)
KINDS = greedy(12, 0, num_tokens=250)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[MockRun]:
    run = mock_run(tmp_path_factory.mktemp("mock"), fork_server, "--pd", "1:2", mocks=MOCKS)
    try:
        run.wait_for("Ctrl-C ends it.")
        yield run
        assert run.end(signal.SIGTERM) == 0
    finally:
        run.close()


@pytest.fixture(scope="module")
def admin(server: MockRun) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture(scope="module")
def expected(server: MockRun) -> dict[str, Answer]:
    answers = asyncio.run(asked_all(server, KINDS))
    assert {(one.error, one.num_tokens) for one in answers.values()} == {("", 250)}
    assert len({tuple(one.tokens[0]) for one in answers.values()}) == len(KINDS)
    return answers


def wrong_while(
    server: MockRun,
    expected: dict[str, Answer],
    act: Callable[[], object],
    kinds: dict[str, Kind] = KINDS,
) -> dict[str, tuple[Answer, Answer]]:
    """Answers that are not the expected ones while ``act`` runs, once all have begun."""

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

    return differences(kinds, expected, asyncio.run(asked()))


def test_streams_outlive_their_engine(server: MockRun, expected: dict[str, Answer]) -> None:
    pid = writer(server.run_dir, "d0")
    assert not wrong_while(server, expected, lambda: os.kill(pid, signal.SIGKILL))
    back(server, "d0", pid)


def test_core_that_dies_at_a_token_is_started_again(
    server: MockRun, expected: dict[str, Answer]
) -> None:
    flag = server.run_dir / "dies-once"
    flag.touch()
    trouble = Trouble("fatal", after_tokens=40, instances=("d0",), once=str(flag))
    server.set_mocks(MockOptions(step_ms=4.0, troubles=(trouble,)))
    pid = writer(server.run_dir, "d0")
    os.kill(pid, signal.SIGKILL)
    back(server, "d0", pid)
    server.set_mocks(MOCKS)
    pid = writer(server.run_dir, "d0")
    assert not wrong_while(server, expected, lambda: None)
    back(server, "d0", pid)
    assert not flag.exists()


def test_instances_come_and_go_under_streams(
    server: MockRun, admin: AdminClient, expected: dict[str, Answer]
) -> None:
    def scaled(decode: int) -> None:
        scaling = admin.scalings.begin(ScaleRequest(1, decode))
        until(lambda: not admin.scalings.show(scaling.id).is_open, "the scaling has ended")
        done = admin.scalings.show(scaling.id)
        assert (done.state, done.reason) == ("done", "")

    assert not wrong_while(server, expected, lambda: scaled(4))
    assert not wrong_while(server, expected, lambda: scaled(2))


def test_rolling_restart_replaces_every_process(
    server: MockRun, admin: AdminClient, expected: dict[str, Answer]
) -> None:
    before = set(server.cores)

    def restarted() -> None:
        restart = admin.restarts.begin(RestartRequest())
        until(lambda: not admin.restarts.show(restart.id).is_open, "the restart has ended")
        done = admin.restarts.show(restart.id)
        assert (done.state, done.reason) == ("done", "")

    assert not wrong_while(server, expected, restarted)
    assert not before & set(server.cores)


def test_drained_instance_gets_nothing(
    server: MockRun, admin: AdminClient, expected: dict[str, Answer]
) -> None:
    admin.drain("d0")
    until(lambda: state_of(admin, "d0") == "drained", "d0 is drained")
    assert not wrong_while(server, expected, lambda: None)
    admin.release("d0")
    until(lambda: state_of(admin, "d0") == "ready", "d0 serves again")


def state_of(admin: AdminClient, name: str) -> str:
    return next(one.state for one in admin.status().instances if one.id == name)
