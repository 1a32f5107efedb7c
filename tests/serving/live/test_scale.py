"""A server grows and shrinks while it serves: no answer notices. Random weights, float32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

import small_model
import written_prompts
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.cli.main import main
from banaserve.contracts.instances import Scaling
from banaserve.frontdoor.admin_client import AdminClient
from observing import until, writers
from reference import tokenizer
from scaling_streams import Streams, has_served, ids_of, one_of_each_again, scaled, series_of
from server_run import Run
from stream_kinds import made_kinds
from streams import Answer, Kind, asked_all

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 300
"""Enough that an instance of such a small model has streams when it leaves."""
LONG = ("greedy", "seeded", "penalties", "logprobs", "three", "chat")
KINDS = (
    "greedy",
    "seeded",
    "penalties",
    "min_tokens",
    "logprobs",
    "regex",
    "three",
    "json",
    "chat",
)


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
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve(
        *("--pd", "1:1", "--dtype", "float32", "--max-model-len", "2048"),
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--kv-cache-memory-bytes", str(256 << 20)),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def admin(server: Run) -> AdminClient:
    return AdminClient(*find_admin(server.run_dir))


@pytest.fixture(autouse=True)
def one_of_each(admin: AdminClient) -> Iterator[None]:
    """However a test ends, the next one begins with one instance of each role."""
    yield
    one_of_each_again(admin)


@pytest.fixture(scope="module")
def expected(server: Run, kinds: dict[str, Kind]) -> dict[str, Answer]:
    answers = asyncio.run(asked_all(server, kinds))
    assert [name for name, answer in answers.items() if answer.error] == []
    return answers


def test_no_answer_notices_that_instances_come_and_go(
    server: Run, admin: AdminClient, kinds: dict[str, Kind], expected: dict[str, Answer]
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

    grown, shrunk, back = asyncio.run(run())
    assert streams.wrong == []
    assert set(streams.num_answers) == set(kinds)
    assert (grown.added, grown.removed) == (["p1", "d1"], [])
    assert (shrunk.added, len(shrunk.removed)) == ([], 1)
    assert (back.added, len(back.removed)) == ([], 1)
    left, gone = ids_of(admin), [*shrunk.removed, *back.removed]
    assert sorted([*left, *gone]) == ["d0", "d1", "p0", "p1"]
    for name in ("banaserve_instance_ready", "banaserve_steps_total"):
        assert [server.metric(name, instance_id=one) > 0 for one in left] == [True, True]
    # The orchestrator forgets them at its next turn.
    until(lambda: series_of(server, gone) == [], "no series of those that left is shown")
    assert {log for log, _ in writers(server.run_dir)} & {f"{one}.log" for one in gone} == set()
    assert server.get("/ready").json()["instances"] == dict.fromkeys(left, "ready")


def test_the_last_of_a_role_is_not_drained_and_what_is_there_is_not_added(
    server: Run, admin: AdminClient, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = next(one.id for one in admin.status().instances if one.role == "decode")
    with pytest.raises(UserError, match="only one that serves decode"):
        admin.drain(decoding)
    assert main(["scale", "--pd", "1:1", "--run-dir", str(server.run_dir)]) == 0
    assert capsys.readouterr().out == "there are 1:1 already\n"
