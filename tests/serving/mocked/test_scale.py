"""A server with mock engines grows and shrinks while it serves: no answer notices.

What takes real engines is in ``live/test_scale.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator

import psutil
import pytest

import small_model
import written_prompts
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.main import main
from banaserve.contracts.control_api import ScaleRequest
from banaserve.contracts.instances import Scaling
from banaserve.frontdoor.admin_client import AdminClient
from mock_facts import MockOptions
from mock_run import MockRun
from observing import until, writers
from reference import tokenizer
from scaling_streams import (
    Streams,
    ended,
    has_served,
    ids_of,
    one_of_each_again,
    scaled,
    series_of,
    started,
)
from stream_kinds import made_kinds
from streams import Answer, Kind, asked_all, back

pytestmark = pytest.mark.deep

OUTPUT_TOKENS = 300
"""Enough that an instance has streams when it leaves."""
MAX_ROUNDS = 5
LONG = ("greedy", "seeded", "penalties", "logprobs", "three", "chat")
KINDS = (*LONG, "min_tokens", "stop")
# A machine of any size has room for a few more instances and not for 798.
MOCKS = MockOptions(step_ms=2.0, instance_bytes=psutil.virtual_memory().total // 700)
ENDLESS_STARTS = MockOptions(start_ms=600_000.0)


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    (long,) = written_prompts.prompts("synthetic", 1, 150, 200, 9, str.split)
    (short,) = written_prompts.prompts("synthetic", 1, 60, 80, 10, str.split)
    ids = tokenizer(small_model.resolve().path_or_id)(long.text)
    made = made_kinds(ids, short.text)
    for name in LONG:
        made[name].body["max_tokens"] = OUTPUT_TOKENS
    return {name: made[name] for name in KINDS}


@pytest.fixture(scope="module")
def server(serve: Callable[..., MockRun]) -> Iterator[MockRun]:
    run = serve("--pd", "1:1", "--max-model-len", "2048", mocks=MOCKS)
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def admin(server: MockRun) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture(autouse=True)
def one_of_each(admin: AdminClient) -> Iterator[None]:
    """However a test ends, the next one begins with one instance of each role."""
    yield
    one_of_each_again(admin)


@pytest.fixture
def endless_starts(server: MockRun) -> Iterator[None]:
    """Cores that start meanwhile are never ready."""
    server.set_mocks(ENDLESS_STARTS)
    yield
    server.set_mocks(MOCKS)


@pytest.fixture(scope="module")
def expected(server: MockRun, kinds: dict[str, Kind]) -> dict[str, Answer]:
    answers = asyncio.run(asked_all(server, kinds))
    assert [name for name, answer in answers.items() if answer.error] == []
    return answers


def roles_of(admin: AdminClient) -> Counter[str]:
    return Counter(one.role for one in admin.status().instances)


def test_no_answer_notices_that_instances_come_and_go(
    server: MockRun, admin: AdminClient, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    streams = Streams(server, kinds, expected)

    def scale() -> list[Scaling]:
        grown = scaled(admin, 2, 2)
        for name in grown.added:
            until(lambda name=name: has_served(server, name), f"{name} has served")
        return [grown, scaled(admin, 1, 2), scaled(admin, 1, 1)]

    async def run() -> list[Scaling]:
        async with streams.running():
            return await asyncio.to_thread(scale)

    before = ids_of(admin)
    grown, shrunk, back = asyncio.run(run())
    assert streams.wrong == []
    assert set(streams.num_answers) == set(kinds)
    assert (len(grown.added), grown.removed) == (2, [])
    assert (shrunk.added, len(shrunk.removed)) == ([], 1)
    assert (back.added, len(back.removed)) == ([], 1)
    left, gone = ids_of(admin), [*shrunk.removed, *back.removed]
    assert sorted([*left, *gone]) == sorted([*before, *grown.added])
    for name in ("banaserve_instance_ready", "banaserve_steps_total"):
        assert [server.metric(name, instance_id=one) > 0 for one in left] == [True, True]
    # The orchestrator forgets them at its next turn.
    until(lambda: series_of(server, gone) == [], "no series of those that left is shown")
    assert {log for log, _ in writers(server.run_dir)} & {f"{one}.log" for one in gone} == set()
    assert server.get("/ready").json()["instances"] == dict.fromkeys(left, "ready")


def test_streams_of_one_that_leaves_go_on_elsewhere(
    server: MockRun, admin: AdminClient, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    """Its streams may just have ended when it leaves: then another one comes and leaves."""
    streams = Streams(server, {name: kinds[name] for name in LONG}, expected)

    def num_moved() -> float:
        return server.metric("banaserve_streams_moved_total")

    def all_decode() -> bool:
        found = [one for one in admin.status().instances if one.role == "decode"]
        return all(one.inflight_requests for one in found)

    def scale() -> float:
        before = num_moved()
        for _ in range(MAX_ROUNDS):
            scaled(admin, 1, 2)
            until(all_decode, "each decode instance has streams")
            scaled(admin, 1, 1)
            if num_moved() > before:
                break
        return num_moved() - before

    async def run() -> float:
        async with streams.running():
            return await asyncio.to_thread(scale)

    assert asyncio.run(run()) > 0
    assert streams.wrong == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--pd", "0:1"], "leaves no instance to serve prefill"),
        (["--pd", "1:0"], "leaves no instance to serve decode"),
        (["--pd", "400:400"], "798 more instances need about"),
        (["--pd", "two"], "such as 1:1"),
        (["--pd", "1000:1"], "such as 1:1"),
        (["--colocated", "-1"], "give 0 to 999"),
        (["--instances", "3"], "the roles are fixed on this server"),
        (["--pd", "2:2", "--timeout", "0"], "--timeout 0: must be more than 0"),
        ([], "say how many instances"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    argv: list[str],
    said: str,
    server: MockRun,
    admin: AdminClient,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = ids_of(admin)
    assert main(["scale", *argv, "--run-dir", str(server.run_dir)]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert (out, len(err.splitlines())) == ("", 1)
    assert ids_of(admin) == before


def test_the_last_of_a_role_is_not_drained_and_what_is_there_is_not_added(
    server: MockRun, admin: AdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = next(one.id for one in admin.status().instances if one.role == "decode")
    with pytest.raises(UserError, match="only one that serves decode"):
        admin.drain(decoding)
    assert main(["scale", "--pd", "1:1", "--run-dir", str(server.run_dir)]) == 0
    assert capsys.readouterr().out == "there are 1:1 already\n"


@pytest.mark.usefixtures("endless_starts")
def test_a_start_that_fails_leaves_everything_as_it_was(
    server: MockRun, admin: AdminClient, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    streams, before = Streams(server, kinds, expected), ids_of(admin)

    def kill_what_starts() -> Scaling:
        scaling = admin.scalings.begin(ScaleRequest(1, 3))
        with pytest.raises(UserError, match=f"scaling {scaling.id} to 1:3 is under way"):
            admin.scalings.begin(ScaleRequest(2, 1))
        moves = [move.what for move in admin.status().moves if move.id == scaling.id]
        assert moves == [f"to 1:3: {', '.join(admin.scalings.show(scaling.id).added)}: starting"]
        os.kill(started(server, admin.scalings.show(scaling.id).added[0]), signal.SIGKILL)
        return ended(admin, scaling)

    async def run() -> Scaling:
        async with streams.running():
            return await asyncio.to_thread(kill_what_starts)

    failed = asyncio.run(run())
    assert (failed.state, failed.added) == ("failed", [])
    assert "ended while starting" in failed.reason
    assert ids_of(admin) == before
    assert streams.wrong == []


@pytest.mark.usefixtures("endless_starts")
def test_a_scaling_that_is_given_up_leaves_everything_as_it_was(
    server: MockRun, admin: AdminClient
) -> None:
    before = ids_of(admin)
    scaling = admin.scalings.begin(ScaleRequest(2, 1))
    admin.scalings.abort(scaling.id)
    assert ended(admin, scaling).state == "aborted"
    assert ids_of(admin) == before
    with pytest.raises(UserError, match="nothing to abort"):
        admin.scalings.abort(scaling.id)


def test_no_answer_notices_kills_while_instances_come_and_go(
    server: MockRun, admin: AdminClient, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    """One that stays is killed while others start, and one that leaves while it does."""
    streams = Streams(server, kinds, expected)

    def scale_and_kill() -> list[Scaling]:
        staying = next(one.id for one in admin.status().instances if one.role == "decode")
        growing = admin.scalings.begin(ScaleRequest(1, 2))
        os.kill(pid := started(server, staying), signal.SIGKILL)
        grown = ended(admin, growing)
        back(server, staying, pid)
        leaving = grown.added[0]
        admin.drain(leaving)  # what is drained is the first to leave
        pid = started(server, leaving)
        shrinking = admin.scalings.begin(ScaleRequest(1, 1))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        shrunk = ended(admin, shrinking)
        assert shrunk.removed == [leaving]
        return [grown, shrunk]

    async def run() -> list[Scaling]:
        async with streams.running():
            return await asyncio.to_thread(scale_and_kill)

    assert [(one.state, one.reason) for one in asyncio.run(run())] == [("done", "")] * 2
    assert streams.wrong == []
    assert roles_of(admin) == Counter(prefill=1, decode=1)
