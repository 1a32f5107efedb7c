"""Replica whose engine is simulated: ``python simulated_replica.py PORT LOG``.

The simulator's engine (batches, chunked prefill, memory, a prefix cache) in real time, behind the
OpenAI API as far as a balancer needs it. A prompt's last word names the request; the answer repeats
it. Each answer that was sent whole is a line in LOG.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import uvloop

from banaserve.base.types import RequestId
from banaserve.sim.timeline import Timeline
from banaserve_route.policies.interface import Request
from banaserve_route.sim.replica import (
    BLOCK_TOKENS,
    UNIT_BYTES,
    Accelerator,
    ReplicaJob,
    SimReplica,
)
from benchmarks.prompt_digests import CHARS_A_TOKEN, digests

SPEC = Accelerator(20.0, 0.2, 0.2, 24_000, 16_000, 16, 2048)
"""Modelled accelerator, two to three times as fast as an L4: many requests in a few seconds."""

_STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


class Engine:
    """A simulated replica that runs in wall time."""

    def __init__(self, spec: Accelerator) -> None:
        self._timeline = Timeline()
        self._replica = SimReplica("self", "here", spec, self._timeline)
        self._began_s = monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, job: ReplicaJob) -> None:
        """Accept a request; its callbacks come when its tokens are due."""
        self._catch_up()
        self._replica.submit(job)
        self._catch_up()

    def metrics(self) -> bytes:
        """Return the load as vLLM reports it, in Prometheus' text format."""
        replica = self._replica
        return (
            f"vllm:num_requests_waiting {len(replica.waiting)}\n"
            f"vllm:num_requests_running {len(replica.running)}\n"
            f"vllm:kv_cache_usage_perc {min(1.0, replica.kv_used_fraction):.3f}\n"
        ).encode()

    def _catch_up(self) -> None:
        self._timeline.run(monotonic() - self._began_s)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if (next_s := self._timeline.next_s) is not None:
            delay_s = max(0.0, next_s - (monotonic() - self._began_s))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._catch_up)


def job_of(
    prompt: str, output_tokens: int, first: Callable[[], None], done: Callable[[], None]
) -> ReplicaJob:
    """Return a request for the engine; its callbacks come when tokens are due."""
    units = digests(prompt.encode())
    num_tokens = max(1, len(prompt) // CHARS_A_TOKEN)
    output = bytes(UNIT_BYTES * max(1, output_tokens // BLOCK_TOKENS))
    return ReplicaJob(Request(RequestId(""), num_tokens, units), output, first, done)


class _Door:
    """HTTP server in front of the engine."""

    def __init__(self, engine: Engine, log: int) -> None:
        self._engine, self._log = engine, log

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                _, found, rest = head.lower().partition(b"content-length:")
                body = await reader.readexactly(int(rest.split(b"\r\n")[0]) if found else 0)
                await self._answer(head, body, writer)
                if b"connection: close" in head.lower():
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
                    return
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"POST"):
            asked = json.loads(body)
            await self._complete(asked["prompt"], int(asked["max_tokens"]), writer)
            return
        page = self._engine.metrics() if head.startswith(b"GET /metrics ") else b"{}"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))

    async def _complete(
        self, prompt: str, output_tokens: int, writer: asyncio.StreamWriter
    ) -> None:
        name, ended = prompt.rpartition(" ")[2], asyncio.get_running_loop().create_future()

        def first() -> None:
            if not writer.transport.is_closing():
                writer.write(_STREAM + _event({"choices": [{"text": " begin"}]}))

        def done() -> None:
            if not ended.done():
                ended.set_result(None)

        job = job_of(prompt, output_tokens, first, done)
        self._engine.submit(job)
        await ended
        if writer.transport.is_closing():
            return
        usage = {
            "prompt_tokens": job.request.num_tokens,
            "completion_tokens": output_tokens,
            "prompt_tokens_details": {"cached_tokens": job.hit_tokens},
        }
        # Before the answer: the log must have what a client has, whatever kills this process.
        os.write(self._log, f"{name}\n".encode())
        last = _event({"choices": [{"text": f" {name}"}], "usage": usage})
        writer.write(last + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


def _event(value: dict[str, Any]) -> bytes:
    data = b"data: %b\n\n" % json.dumps(value).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def _serve(port: int, log_path: Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    serve: Callable[..., Awaitable[None]] = _Door(Engine(SPEC), log).serve
    server = await asyncio.start_server(serve, "127.0.0.1", port, limit=1 << 24)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1]), Path(sys.argv[2])))
