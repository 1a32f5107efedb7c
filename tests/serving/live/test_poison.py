"""A request under which every engine dies is refused, and it alone: what runs beside it goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from observing import until
from poison import DIES_AT
from server_run import Run
from streams import Answer, Kind, asked, asked_all, connected, differences

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MODEL = "smollm2-135m"
NAMES = ("p0", "d0", "d1")
NUM_STREAMS = 8
STREAM_TOKENS = 400
COMMON = {"model": MODEL, "stream": True, "return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    here = Path(__file__).parent
    run = serve(
        *("--pd", "1:2", "--dtype", "float32", "--max-model-len", "2048", "--migration", "off"),
        *("--logits-processors", "poison:Poison", "--kv-cache-memory-bytes", str(256 << 20)),
        env={"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(here)])},
    )
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    drawn = {"temperature": 0.8, "max_tokens": STREAM_TOKENS}
    return {
        f"stream {n}": Kind(
            "/v1/completions", {**COMMON, **drawn, "prompt": f"Story {n} begins:", "seed": n}
        )
        for n in range(NUM_STREAMS)
    }


@pytest.fixture(scope="module")
def expected(server: Run, kinds: dict[str, Kind]) -> dict[str, Answer]:
    return asyncio.run(asked_all(server, kinds))


def poison(number: int, name: str) -> Kind:
    """A request whose engine dies before its token of this number."""
    body = {**COMMON, "prompt": f"{name}: a prompt that no cache knows.", "max_tokens": 20}
    return Kind("/v1/completions", {**body, "vllm_xargs": {DIES_AT: number}})


def num_restarts(server: Run) -> int:
    return int(server.metric("banaserve_instance_restarts_total"))


def test_alone_it_is_refused_after_three_deaths(server: Run) -> None:
    before = num_restarts(server)
    body = {**poison(6, "alone").body, "stream": False, "return_token_ids": False}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=180.0)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    error = answer.json()["error"]
    assert error["code"] == "engines_died"
    assert "3 instances died one after the other under this request" in error["message"]
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    assert num_restarts(server) - before == 3


@pytest.mark.parametrize("number", [5, 0], ids=["while it decodes", "in its prefill"])
def test_beside_others_it_is_refused_and_their_streams_go_on(
    number: int, server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    """Its engines die of it at once, before any stream beside it has come further."""
    restarts, refused = num_restarts(server), server.metric("banaserve_requests_given_up_total")
    retries = server.metric("banaserve_leg_retries_total")

    async def run() -> tuple[Answer, dict[str, Answer]]:
        seen: set[int] = set()
        begun = asyncio.Event()

        def see(answer: Answer) -> None:
            seen.add(id(answer))
            if len(seen) == len(kinds):
                begun.set()

        others = asyncio.create_task(asked_all(server, kinds, see))
        await begun.wait()
        async with connected(server) as client:
            answer = await asked(client, poison(number, f"beside {number}"))
        return answer, await others

    answer, found = asyncio.run(run())
    assert "instances died one after the other under this request" in answer.error
    assert max(0, number - 1) <= answer.num_tokens <= number  # the last may die on its way
    assert differences(kinds, expected, found) == {}
    assert server.metric("banaserve_requests_given_up_total") - refused == 1
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    num_deaths = num_restarts(server) - restarts
    assert num_deaths in (3, 4)
    if number:
        num_retries = server.metric("banaserve_leg_retries_total") - retries
        assert num_retries > num_deaths - 1, "nothing ran beside it"


def test_every_instance_serves_as_before(
    server: Run, kinds: dict[str, Kind], expected: dict[str, Answer]
) -> None:
    assert server.is_ready(*NAMES)
    assert differences(kinds, expected, asyncio.run(asked_all(server, kinds))) == {}
