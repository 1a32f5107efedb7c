"""Instances and the store die or stand still under 16 streams: no request hangs or goes wrong.

What happens to requests alone, not to KV, is in ``mocked/test_faults.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

import written_prompts
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from observing import until, writer
from server_run import Run
from streams import back

pytestmark = pytest.mark.e2e

SERVE_OPTIONS = ("--pd", "2:2", "--dtype", "float32", "--engine-stall-timeout", "5")
NUM_STREAMS = 16
DEADLINE_S = 180.0
NAMES = ("p0", "p1", "d0", "d1")


@pytest.fixture(scope="module")
def run_dir(server: Run) -> Path:
    return server.run_dir


@pytest.fixture(scope="module")
def calls() -> list[CompletionCall]:
    texts = written_prompts.prompts("synthetic", NUM_STREAMS, 60, 200, 4, str.split)
    return [
        CompletionCall(str(i), prompt=prompt.text, max_tokens=48, extra={"ignore_eos": True})
        for i, prompt in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def expected(server: Run, calls: list[CompletionCall]) -> list[list[int]]:
    records = asyncio.run(stream_all(server, calls))
    assert [record.error for record in records] == [None] * NUM_STREAMS
    return [record.token_ids for record in records]


async def stream_all(server: Run, calls: list[CompletionCall]) -> list[RequestRecord]:
    async with OpenAiClient(
        server.url, "smollm2-135m", return_token_ids=True, timeout_s=DEADLINE_S
    ) as client:
        return list(await asyncio.gather(*(client.send(call) for call in calls)))


@pytest.mark.parametrize(
    ("victim", "number", "started_tokens"),
    [
        ("p0", signal.SIGKILL, 0),
        ("d0", signal.SIGKILL, 4),
        ("d1", signal.SIGSTOP, 4),
        ("kvstore", signal.SIGKILL, 4),
    ],
)
def test_a_death_under_load_breaks_no_answer(
    victim: str,
    number: signal.Signals,
    started_tokens: int,
    server: Run,
    run_dir: Path,
    calls: list[CompletionCall],
    expected: list[list[int]],
) -> None:
    pid = writer(run_dir, victim)

    async def load_and_kill() -> list[RequestRecord]:
        # Counted from before the streams: who looks late may see their last tokens.
        enough = await asyncio.to_thread(generated, server) + started_tokens * NUM_STREAMS
        streams = asyncio.create_task(stream_all(server, calls))
        await asyncio.to_thread(until, lambda: generated(server) >= enough, "streams began")
        os.kill(pid, number)
        return await streams

    # Other prompts, or the store and the caches would answer before anybody can be killed.
    if victim == "p0":
        calls = [
            CompletionCall(
                c.id, prompt=f"Once more: {c.prompt}", max_tokens=c.max_tokens, extra=c.extra
            )
            for c in calls
        ]
        expected = []
    records = asyncio.run(load_and_kill())
    assert [record.error for record in records] == [None] * NUM_STREAMS
    if expected:
        assert [record.token_ids for record in records] == expected
    else:
        again = asyncio.run(stream_all(server, calls))
        assert [r.token_ids for r in again] == [r.token_ids for r in records]
    # One that had nothing to do when it was struck is found out later than the streams end.
    back(server, victim, pid)
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    until(lambda: server.metric("banaserve_kvstore_leased_slots") == 0, "no leases")
    until(lambda: server.metric("banaserve_kvstore_writing_slots") == 0, "nothing half written")
    assert server.metric("banaserve_requests_in_flight") == 0


@pytest.mark.parametrize("victim", ["p0", "kvstore"])
def test_legs_that_share_a_prefix_answer_when_what_they_wait_for_dies(
    victim: str, server: Run, run_dir: Path
) -> None:
    """One prefill instance computes the prefix, the other one's legs wait for it in the store."""
    (prefix,) = written_prompts.prompts("synthetic", 1, 500, 520, len(victim), str.split)
    # Long enough that none has ended before all have come, unless a busy machine looks late.
    calls = [CompletionCall(str(i), prompt=f"{prefix.text} {i}", max_tokens=64) for i in range(12)]

    async def load_and_kill() -> list[RequestRecord]:
        streams = asyncio.create_task(stream_all(server, calls))
        came = len(calls)

        def have_come() -> bool:
            return server.metric("banaserve_requests_in_flight") >= came or streams.done()

        await asyncio.to_thread(until, have_come, "all came")
        os.kill(pid, signal.SIGKILL)
        return await streams

    pid = writer(run_dir, victim)
    records = asyncio.run(load_and_kill())
    assert [record.error for record in records] == [None] * len(calls)
    back(server, victim, pid)
    again = asyncio.run(stream_all(server, calls))
    assert [r.token_ids for r in again] == [r.token_ids for r in records]
    until(lambda: server.metric("banaserve_kvstore_writing_slots") == 0, "nothing half written")


def test_answers_are_the_same_after_all_that(
    server: Run, calls: list[CompletionCall], expected: list[list[int]]
) -> None:
    records = asyncio.run(stream_all(server, calls))
    assert [record.token_ids for record in records] == expected


def generated(server: Run) -> float:
    return server.metric("vllm:generation_tokens_total")
