"""Turns of agents under way: seats of sessions, of which each has one session after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_route.sim.programs import ProgramCall
from banaserve_route.sim.replica import UNIT_BYTES
from benchmarks.agents.sessions import PromptTokens
from benchmarks.routers.loads import Steps

RAMP_FRACTION = 0.1
SESSIONS_A_SEAT = 40
"""Number of sessions that are drawn for each seat: more than it can have."""


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """A call of a session.

    Attributes:
        is_last: True if it is of the last step of its session.
        record: Record of the request, in seconds of the client's clock; without an end if the run
            has cut it off.
    """

    prompt: list[int]
    is_last: bool
    record: RequestRecord


async def run_seats(
    client: OpenAiClient, sessions: Iterator[Steps], seed: int, num_seats: int, duration_s: float
) -> list[AgentTurn]:
    """Keep ``num_seats`` sessions under way for ``duration_s``; return their turns as sent.

    The first sessions begin one after the other within a tenth of the time.

    Raises:
        UserError: A request failed.
    """
    tokens, turns = PromptTokens(seed), list[AgentTurn]()
    # Drawn before the run: which session a seat gets must not depend on the speed of a server.
    lists = [list[Steps]() for _ in range(num_seats)]
    for number in range(num_seats * SESSIONS_A_SEAT):
        lists[number % num_seats].append(next(sessions))

    async def call(one: ProgramCall, name: str, is_last: bool) -> None:
        prompt = tokens.of(one.prompt)
        num_output = len(one.output) // UNIT_BYTES
        asked = CompletionCall.exact(name, prompt, num_output, user=one.session)
        record = RequestRecord(id=name, sent_at_s=client.clock.now())
        turns.append(AgentTurn(prompt, is_last, record))
        await client.send_into(asked, record)
        tokens.answered(one.output, record.checked().token_ids)

    async def seat(number: int) -> None:
        await client.clock.sleep(RAMP_FRACTION * duration_s * number / num_seats)
        for place, steps in enumerate(lists[number]):
            last = max(n for n, step in enumerate(steps) if isinstance(step, list))
            for n, step in enumerate(steps[: last + 1]):
                if isinstance(step, list):
                    names = [f"{number}.{place}.{n}.{k}" for k in range(len(step))]
                    calls = zip(step, names, strict=True)
                    await asyncio.gather(*(call(*each, n == last) for each in calls))
                else:
                    await client.clock.sleep(step)
        raise AssertionError(f"seat {number} had more than {SESSIONS_A_SEAT} sessions")

    async with asyncio.TaskGroup() as group:
        seats = [group.create_task(seat(number)) for number in range(num_seats)]
        await client.clock.sleep(duration_s)
        for task in seats:
            task.cancel()
    return turns
