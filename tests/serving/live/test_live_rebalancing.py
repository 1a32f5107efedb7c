"""Running streams of real engines move to balance the load: tokens are those of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

import small_model
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.trace_events import LegFailed
from banaserve.frontdoor.admin_client import AdminClient
from depth import IS_LONG
from fork_server import ForkServer
from observing import until
from reference import reference_tokens
from server_run import Run
from streams import Answer, asked_all, greedy

pytestmark = pytest.mark.e2e

NUM_STREAMS, OUTPUT_TOKENS = 16, 400
NUM_MOVES = 200 if IS_LONG else 8
KINDS = greedy(NUM_STREAMS, 6000, OUTPUT_TOKENS)
OTHERS = ("d1", "d2")


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    words = ("--pd", "1:3", "--dtype", "float32", "--max-model-len", "1024", "--rebalance")
    run = serve(*words, "--migration", "off", "--kv-cache-memory-bytes", str(512 << 20))
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def expected(fork_server: ForkServer) -> list[list[int]]:
    prompts = [kind.body["prompt"] for kind in KINDS.values()]
    greedily = {"": {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}}
    return reference_tokens(fork_server, small_model.options()[1], prompts, greedily)[""]


def moved(server: Run) -> float:
    return server.metric("banaserve_streams_rebalanced_total")


def test_streams_that_move_again_and_again_have_the_tokens_of_one_engine(
    server: Run, expected: list[list[int]]
) -> None:
    """Drains gather the streams on d0; when others serve again, the rebalancer spreads them."""
    admin = AdminClient(*find_admin(server.run_dir))

    def gather_and_release() -> None:
        before = moved(server)
        for name in OTHERS:
            admin.drain(name)
        for name in OTHERS:
            until(lambda name=name: admin.show_drain(name, wait_s=5.0).num_left == 0, "it is empty")
            admin.release(name)
        until(lambda: moved(server) > before or not running(server), "streams go elsewhere")

    async def asked_under_moves() -> dict[str, Answer]:
        asking = asyncio.create_task(asked_all(server, KINDS))

        def all_decode() -> bool:
            return running(server) == NUM_STREAMS or asking.done()

        await asyncio.to_thread(until, all_decode, "all decode")
        while not asking.done():
            await asyncio.to_thread(gather_and_release)
            if moved(server) >= NUM_MOVES:
                break
        return await asking

    while moved(server) < NUM_MOVES:
        answers = asyncio.run(asked_under_moves())
        assert [answer.error for answer in answers.values()] == [""] * NUM_STREAMS
        assert [answer.tokens[0] for answer in answers.values()] == expected
        for summary in admin.requests(NUM_STREAMS):
            at_s = [
                line.at_s
                for line in admin.trace(summary.id).lines
                if isinstance(line.event, LegFailed) and line.event.why == "rebalanced"
            ]
            assert all(after - before >= 10.0 for before, after in pairwise(at_s))


def running(server: Run) -> float:
    return sum(
        server.metric("banaserve_requests_in_flight", instance_id=n) for n in ("d0", *OTHERS)
    )
