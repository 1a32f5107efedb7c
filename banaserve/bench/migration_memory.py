"""More memory, more work: a pool that preempts, before and after layers have moved away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.api.admin_client import AdminClient
from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.servers import Server
from banaserve.errors import UserError

_LOOK_S = 0.5
"""A look costs the front door a page of metrics, which two cores feel."""


@dataclass(frozen=True)
class Batch:
    """One pass of all requests.

    Attributes:
        running: Mean number of requests in the running batch, while any ran.
        preemptions: During the pass.
    """

    tokens_per_s: float
    running: float
    preemptions: float
    num_blocks: int
    token_ids: list[list[int]]


async def run_batch(
    server: Server,
    admin: AdminClient,
    client: OpenAiClient,
    prompts: Sequence[list[int]],
    output_tokens: int,
) -> Batch:
    """Send all prompts at once and wait for all answers."""
    calls = [
        Call(str(i), list(prompt), max_tokens=output_tokens, extra={"ignore_eos": True})
        for i, prompt in enumerate(prompts)
    ]
    preempted = _preemptions(server)
    began_s = client.clock.now()
    sending = asyncio.gather(*(client.send(call) for call in calls))
    seen: list[float] = []
    while not sending.done():
        seen.append(await asyncio.to_thread(_running, server))
        await asyncio.sleep(_LOOK_S)
    seconds = client.clock.now() - began_s
    records = await sending
    if failed := [record.error for record in records if record.error]:
        raise UserError(f"a request failed: {failed[0]}")
    placed = await asyncio.to_thread(admin.placement)
    (host,) = [one for one in placed.instances if one.id == "d0"]
    busy = [number for number in seen if number] or [0.0]
    return Batch(
        tokens_per_s=len(calls) * output_tokens / seconds,
        running=sum(busy) / len(busy),
        preemptions=_preemptions(server) - preempted,
        num_blocks=host.num_blocks,
        token_ids=[record.token_ids for record in records],
    )


def _running(server: Server) -> float:
    return server.metric("vllm:num_requests_running", instance_id="d0")


def _preemptions(server: Server) -> float:
    return server.metric("vllm:num_preemptions_total", instance_id="d0")
