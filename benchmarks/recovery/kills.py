"""A stream whose decode instance is killed in the middle, on a server that starts it again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from banaserve.base.errors import UserError
from banaserve.frontdoor.admin_client import AdminClient
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.servers import Server, wait_until
from benchmarks.measurement import administered_server
from benchmarks.recovery.figures import TracedRecovery, pause_s, read_trace

_LOOK_S = 0.002
_BACK_TIMEOUT_S = 120.0
_HEALTHY_S = 10.5
"""Seconds of service that reset the pause before the next start and the count of starts."""


class KillPlan(NamedTuple):
    """A stream and the time of its instance's death.

    Attributes:
        at_token: Number of output tokens that the client has when the kill comes.
        max_tokens: Number of output tokens of the whole stream.
    """

    name: str
    prompt: list[int]
    at_token: int
    max_tokens: int

    def call(self, suffix: str) -> CompletionCall:
        return CompletionCall.exact(
            self.name, self.prompt, self.max_tokens, request_id=f"{self.name}-{suffix}"
        )


class Killed(NamedTuple):
    """A stream that resumed after a kill."""

    token_ids: list[int]
    pause_s: float
    traced: TracedRecovery


@dataclass
class KilledServer:
    """A server whose engines are killed.

    Attributes:
        ready_s: Time when each killed instance served again, on the machine's monotonic clock.
    """

    server: Server
    admin: AdminClient
    run_dir: Path
    model: str
    ready_s: dict[str, float] = field(default_factory=dict)

    async def answer(self, plan: KillPlan) -> list[int]:
        """Return the tokens of the plan's request without a kill."""
        async with OpenAiClient(self.server.url, self.model, return_token_ids=True) as client:
            record = await client.send(plan.call("whole"))
        return record.checked().token_ids

    async def kill_under(self, plan: KillPlan) -> Killed:
        """Run the plan; return when the stream has ended and the instance serves again.

        Raises:
            UserError: The stream failed, or the instance did not come back.
        """
        await self._until_healthy()
        async with OpenAiClient(self.server.url, self.model, return_token_ids=True) as client:
            call = plan.call("killed")
            record = RequestRecord(id=call.id, sent_at_s=client.clock.now())
            stream = asyncio.create_task(client.send_into(call, record))
            await _until_tokens(stream, record, plan.at_token // 2)
            (asked,) = await asyncio.to_thread(self.admin.requests, last=1)
            victim = asked.instances[-1]
            pid = engine_pid(self.run_dir, victim)
            await _until_tokens(stream, record, plan.at_token)
            killed_at_s = time.time()
            os.kill(pid, signal.SIGKILL)
            (await stream).checked()
        trace = await asyncio.to_thread(self.admin.trace, f"{plan.name}-killed")
        traced = read_trace(trace, killed_at_s - trace.summary.arrived_at_s)
        await self._until_back(victim)
        return Killed(record.token_ids, pause_s(record.token_at_s, traced.resumed_tokens), traced)

    async def _until_healthy(self) -> None:
        """Wait until all instances are healthy: an early death delays the restart."""
        last_s = max(self.ready_s.values(), default=-_HEALTHY_S)
        await asyncio.sleep(max(0.0, last_s + _HEALTHY_S - time.monotonic()))

    async def _until_back(self, instance: str) -> None:
        metric = partial(self.server.metric, "banaserve_instance_ready", instance_id=instance)
        problem = f"{instance} did not come back in {_BACK_TIMEOUT_S:.0f} s after its kill"
        await asyncio.to_thread(wait_until, lambda: metric() > 0, _BACK_TIMEOUT_S, problem)
        self.ready_s[instance] = time.monotonic()


@contextlib.contextmanager
def killed_server(model: str, served_name: str, *options: str) -> Iterator[KilledServer]:
    """Run ``banaserve serve`` with ``options``; its engines are to be killed."""
    with administered_server(model, *options) as (server, admin, run_dir):
        yield KilledServer(server, admin, run_dir, served_name)


def engine_pid(run_dir: Path, instance: str) -> int:
    """Return the id of the engine's process: the oldest that writes the instance's log.

    Raises:
        UserError: There is no such process.
    """
    log = run_dir / f"{instance}.log"
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{process.pid}/fd/1")) == log:
                return process.pid
    raise UserError(f"no process writes {log}")


async def _until_tokens(
    stream: asyncio.Task[RequestRecord], record: RequestRecord, count: int
) -> None:
    """Return when the client has ``count`` tokens.

    Raises:
        UserError: The stream ended before.
    """
    while len(record.token_at_s) < count:
        if stream.done():
            raise UserError(f"a stream ended before the kill: {record.error or 'no more tokens'}")
        await asyncio.sleep(_LOOK_S)
