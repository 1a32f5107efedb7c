"""Streams of every kind go on when what serves them is killed: as if nothing had happened.

Answers are those of one plain vLLM engine where it can be asked the same thing, and otherwise those
of a run in which nobody dies. Random weights of SmolLM2's shape, float32.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import small_model
import written_prompts
from adapter_files import RANK, write_adapter
from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import find_admin
from banaserve.base.tasks import end_tasks
from banaserve.contracts.control_api import RoleRequest
from banaserve.frontdoor.admin_client import AdminClient
from depth import IS_LONG, chosen_seed
from fork_server import ForkServer
from observing import writer
from reference import reference_tokens, tokenizer
from scaling_streams import has_served, scaled
from server_run import Run
from stream_kinds import BY_ONE_ENGINE, OUTPUT_TOKENS, made_kinds
from streams import Answer, Kind, asked, asked_all, back, connected, differences
from waiting import thinks

pytestmark = pytest.mark.e2e

MODEL = "smollm2-135m"
NUM_KILLS = 200 if IS_LONG else 20
NUM_STREAMS = 16
NAMES = ("p0", "p1", "d0", "d1")
_KILLS_AT_ONCE, _HEALTHY_S = 20, 11.0
"""Number of kills, four of each process, before which all may serve for 11 s.

An instance that has ended more than five times without serving for 10 s is given up.
"""


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    (made,) = written_prompts.prompts("synthetic", 1, 150, 200, 9, str.split)
    return tokenizer(small_model.resolve().path_or_id)(made.text)


@pytest.fixture(scope="module")
def kinds(prompt: list[int]) -> dict[str, Kind]:
    (made,) = written_prompts.prompts("synthetic", 1, 60, 80, 10, str.split)
    return made_kinds(prompt, made.text)


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    run = serve(
        *("--pd", "2:2", "--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        # Random weights would fill it with line breaks.
        *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
        *("--kv-cache-memory-bytes", str(256 << 20)),
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def expected(server: Run, kinds: dict[str, Kind]) -> dict[str, Answer]:
    return asyncio.run(asked_all(server, kinds))


@pytest.mark.spine
def test_answers_are_those_of_one_engine(
    fork_server: ForkServer, expected: dict[str, Answer], prompt: list[int]
) -> None:
    reference = reference_tokens(
        fork_server, small_model.resolve().path_or_id, [prompt], BY_ONE_ENGINE
    )
    for name, (wanted,) in reference.items():
        answer = expected[name]
        assert not answer.error, name
        found = [token for index in sorted(answer.tokens) for token in answer.tokens[index]]
        assert found == wanted, name


@pytest.mark.spine
def test_what_is_asked_for_is_what_comes(expected: dict[str, Answer]) -> None:
    assert [name for name, answer in expected.items() if answer.error] == []
    for name, answer in expected.items():
        assert [len(ends) for ends in answer.ends.values()] == [1] * len(answer.texts), name
    assert len(json.loads(expected["json"].texts[0])) == 6
    # Random weights go on with white space, which its grammar allows.
    assert expected["tool"].texts[0].startswith('{"flavours"')
    assert sorted(expected["three"].tokens) == [0, 1, 2]
    assert len({tuple(tokens) for tokens in expected["three"].tokens.values()}) == 3
    assert len(expected["logprobs"].logprobs[0]) == OUTPUT_TOKENS


def test_every_kind_has_its_first_token_from_prefill(server: Run, kinds: dict[str, Kind]) -> None:
    """Of three sequences the first has; the others draw theirs from the same prompt."""

    def counted() -> Counter[str]:
        name = "banaserve_first_tokens_total"
        return Counter({leg: int(server.metric(name, leg=leg)) for leg in ("prefill", "decode")})

    before = counted()
    other = {name: kind.behind("In other words:") for name, kind in kinds.items()}
    answers = asyncio.run(asked_all(server, other))
    assert [name for name, answer in answers.items() if answer.error] == []
    assert counted() - before == Counter(prefill=len(kinds), decode=2)


@pytest.mark.parametrize(
    "victim",
    [*(pytest.param(one, marks=pytest.mark.spine) for one in ("d0", "p0")), "d1", "kvstore"],
)
def test_no_answer_notices_a_kill(
    victim: str, server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    pid = writer(server.run_dir, victim)
    seen = Counter[str]()
    # An instance that prefills is killed while it does, under prompts that no cache has.
    is_early = victim == "p0"
    asking = {n: k.behind("Once more:") for n, k in kinds.items()} if is_early else kinds
    after = 1 if is_early else random.Random(victim).randint(30, 120)

    def count(_: Answer) -> None:
        seen["chunks"] += 1
        if seen["chunks"] == after:
            os.kill(pid, signal.SIGKILL)

    found = asyncio.run(asked_all(server, asking, count))
    assert seen["chunks"] > after
    wanted = asyncio.run(asked_all(server, asking)) if is_early else expected
    assert differences(kinds, wanted, found) == {}
    back(server, victim, pid)


def unnoticed(
    act: Callable[[], Any], server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> Any:
    """Act while answers are under way, check them, return what the act has returned.

    Beside them are streams that do not end before it, however late a busy machine acts.
    """
    longest = Kind("/v1/completions", {**kinds["greedy"].body, "max_tokens": 1500})

    async def run() -> tuple[dict[str, Answer], Any]:
        num_chunks, are_under_way = 0, asyncio.Event()

        def count(_: Answer) -> None:
            nonlocal num_chunks
            num_chunks += 1
            if num_chunks == 80:
                are_under_way.set()

        async with connected(server) as client:
            beside = [asyncio.create_task(asked(client, longest)) for _ in range(4)]
            answering = asyncio.create_task(asked_all(server, kinds, count))
            await are_under_way.wait()
            done = await asyncio.to_thread(act)
            await end_tasks(*beside)
            return await answering, done

    found, done = asyncio.run(run())
    assert differences(kinds, expected, found) == {}
    return done


@pytest.mark.spine
def test_no_answer_notices_that_an_instance_is_drained(
    server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    """Its streams leave at once; it is sent nothing until it is released."""
    admin = AdminClient(*find_admin(server.run_dir))

    def drain() -> int:
        admin.drain("d0")
        return admin.show_drain("d0", wait_s=30.0).num_left

    before = server.metric("banaserve_streams_moved_total")
    assert unnoticed(drain, server, kinds, expected) == 0
    assert server.metric("banaserve_streams_moved_total") > before
    with pytest.raises(UserError, match="only one that serves decode"):
        admin.drain("d1")
    assert not admin.release("d0").is_held


def test_random_kills_under_mixed_streams_lose_double_and_change_nothing(
    server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    draws = random.Random(chosen_seed(4))
    wrong: list[object] = []
    num_answers = Counter[str]()
    victims = [*NAMES, "kvstore"]

    async def stream(client: httpx.AsyncClient, number: int, stop: asyncio.Event) -> None:
        names = list(kinds)
        while not stop.is_set():
            name = names[number % len(names)]
            number += NUM_STREAMS + 1
            answer = await asked(client, kinds[name])
            num_answers[name] += 1
            wrong.extend(differences({name: kinds[name]}, expected, {name: answer}).items())

    async def run() -> None:
        stop = asyncio.Event()
        async with connected(server) as client:
            streams = [
                asyncio.create_task(stream(client, number, stop)) for number in range(NUM_STREAMS)
            ]
            for number in range(NUM_KILLS):
                if not (place := number % len(victims)):
                    draws.shuffle(victims)
                if number % _KILLS_AT_ONCE == 0:
                    await thinks(_HEALTHY_S)
                victim = victims[place]
                await thinks(draws.uniform(0.0, 1.0))
                pid = await asyncio.to_thread(writer, server.run_dir, victim)
                os.kill(pid, signal.SIGKILL)
                await asyncio.to_thread(back, server, victim, pid)
            stop.set()
            await asyncio.gather(*streams)

    asyncio.run(run())
    assert wrong == []
    assert sum(num_answers.values()) > NUM_KILLS
    assert set(num_answers) == set(kinds)


@pytest.mark.spine
def test_no_answer_notices_that_instances_leave_and_come(
    server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    admin = AdminClient(*find_admin(server.run_dir))
    before = server.metric("banaserve_streams_moved_total")
    shrunk = unnoticed(lambda: scaled(admin, 1, 1), server, kinds, expected)
    assert server.metric("banaserve_streams_moved_total") > before
    assert (shrunk.added, len(shrunk.removed)) == ([], 2)
    for one in admin.status().instances:
        with pytest.raises(UserError, match=f"only one that serves {one.role}"):
            admin.drain(one.id)
        other = "decode" if one.role == "prefill" else "prefill"
        with pytest.raises(UserError, match=f"only one that serves {one.role}"):
            admin.roles.begin(RoleRequest(one.id, other))
    grown = unnoticed(lambda: scaled(admin, 1, 2), server, kinds, expected)
    assert (len(grown.added), grown.removed) == (1, [])
    assert differences(kinds, expected, asyncio.run(asked_all(server, kinds))) == {}
    assert has_served(server, *grown.added)


@pytest.mark.long
def test_streams_with_an_adapter_go_on(
    serve: Callable[..., Run], tmp_path: Path, prompt: list[int]
) -> None:
    """All have one: vLLM on CPU gives requests without one other tokens beside those that do."""
    write_adapter(tmp_path, 1, num_layers=30, hidden=96, kv_hidden=192)
    server = serve(
        *("--pd", "1:2", "--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
        *("--enable-lora", "--max-lora-rank", str(RANK), "--lora-modules", f"adapter={tmp_path}"),
    )
    common = {"model": "adapter", "stream": True, "return_token_ids": True, "prompt": prompt}
    asking = {
        name: Kind("/v1/completions", {**common, **BY_ONE_ENGINE[name]})
        for name in ("greedy", "seeded", "penalties", "regex", "three")
    }
    expected = asyncio.run(asked_all(server, asking))
    assert [name for name, answer in expected.items() if answer.error] == []
    for victim in ("d0", "d1"):
        pid, seen = writer(server.run_dir, victim), Counter[str]()

        def count(_: Answer, pid: int = pid, seen: Counter[str] = seen) -> None:
            seen["chunks"] += 1
            if seen["chunks"] == 40:
                os.kill(pid, signal.SIGKILL)

        found = asyncio.run(asked_all(server, asking, count))
        assert differences(asking, expected, found) == {}
        back(server, victim, pid)
    assert server.metric("banaserve_streams_resumed_total") > 0
    assert server.end() == 0
