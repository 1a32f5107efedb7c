"""Open and closed loops of requests: arrivals at fixed times, or each after an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord

INTERRUPTED = "interrupted"
"""The error of a request whose run was stopped; its record is still given to ``on_record``."""

OnRecord = Callable[[RequestRecord], None]
Asked = TypeVar("Asked")
Done = TypeVar("Done")


def _ignore(record: RequestRecord) -> None: ...


def run_fast(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` like ``asyncio.run``, on uvloop if installed (vLLM has it): less CPU a token."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
        return
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def open_loop(
    client: OpenAiClient,
    calls: Sequence[CompletionCall],
    arrivals_s: Sequence[float],
    on_record: OnRecord = _ignore,
) -> list[RequestRecord]:
    """Send each call at its arrival time and return the records in the order of the calls.

    Args:
        arrivals_s: Arrival time of each call, ascending, in seconds from the start of this
            function.
        on_record: Callback for each request as it ends, in the order of the ends.
    """
    if len(calls) != len(arrivals_s):
        raise ValueError(f"{len(calls)} calls and {len(arrivals_s)} arrival times")
    start_s = client.clock.now()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for call, arrival_s in zip(calls, arrivals_s, strict=True):
            due_at_s = start_s + arrival_s
            await client.clock.sleep(max(0.0, due_at_s - client.clock.now()))
            tasks.append(group.create_task(_sent(client, call, due_at_s, on_record)))
    return [task.result() for task in tasks]


async def closed_loop(
    client: OpenAiClient,
    calls: Sequence[CompletionCall],
    concurrency: int,
    on_record: OnRecord = _ignore,
) -> list[RequestRecord]:
    """Keep ``concurrency`` calls under way; return the records in the order of the calls."""
    if concurrency < 1:
        raise ValueError(f"a concurrency of {concurrency}: give 1 or more")
    return await side_by_side(lambda call: _sent(client, call, None, on_record), calls, concurrency)


async def side_by_side(
    work: Callable[[Asked], Awaitable[Done]], asked: Sequence[Asked], concurrency: int
) -> list[Done]:
    """Do ``work`` for each of ``asked``, ``concurrency`` at a time; return the results in order."""
    found: dict[int, Done] = {}
    waiting = iter(enumerate(asked))

    async def work_on() -> None:
        for place, one in waiting:
            found[place] = await work(one)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asked))):
            group.create_task(work_on())
    return [found[place] for place in range(len(asked))]


async def _sent(
    client: OpenAiClient, call: CompletionCall, due_at_s: float | None, on_record: OnRecord
) -> RequestRecord:
    record = RequestRecord(id=call.id, due_at_s=due_at_s, sent_at_s=client.clock.now())
    try:
        await client.send_into(call, record)
    except asyncio.CancelledError:
        record.error = INTERRUPTED
        record.ended_at_s = client.clock.now()
        on_record(record)
        raise
    on_record(record)
    return record
