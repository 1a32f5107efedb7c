"""A front door on loopback over an application without engines, and bare connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import socket
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Coroutine
from time import monotonic
from typing import Any
from unittest import mock

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.access.tenants import TenantKey
from banaserve.frontdoor.app import ApiServer
from banaserve.frontdoor.edge import refusals
from banaserve.frontdoor.edge.edge import Edge
from banaserve.frontdoor.edge.limits import EdgeLimits
from banaserve.frontdoor.edge.websockets import SessionLimits, WebSocketLimit
from banaserve.frontdoor.middleware.admission import BodyLimit, ConcurrencyLimit
from banaserve.frontdoor.middleware.api_keys import KeyMiddleware
from waiting import DEADLINE_S

KEY = "Authorization: Bearer good\r\n"
NUM_EVENTS = 40
LARGE_BYTES = 64 * 2**20
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: d\r\n"


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """The server's own event loop, whose transports and TLS differ from asyncio's."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    # pytest reads the parameters there, and must not see that the test is a coroutine.
    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    del run.__wrapped__  # type: ignore[attr-defined]
    return run


def refused(cause: str) -> float:
    """How often the front door has refused for ``cause``."""
    return sum(
        sample.value
        for family in refusals.REFUSED.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.labels["cause"] == cause
    )


class Application:
    """Streams events at ``/v1/stream``, has a large ``/metrics``, echoes sessions and bodies.

    Attributes:
        may_go_on: Streams end their second half once it is set.
    """

    def __init__(self) -> None:
        self.may_go_on = asyncio.Event()
        self.num_bodies = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        if scope["type"] == "websocket":
            await self._session(receive, send)
            return
        body, more = b"", True
        while more and scope["method"] == "POST":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.num_bodies += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/v1/stream":
            for number in range(NUM_EVENTS):
                if number == NUM_EVENTS // 2:
                    await self.may_go_on.wait()
                await send(_part(b"data: %d\n\n" % number, more=True))
        elif scope["path"] == "/metrics":
            for _ in range(LARGE_BYTES // 2**16):
                await send(_part(b"x" * 2**16, more=True))
        await send(_part(body, more=False))

    async def _session(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})


def _part(body: bytes, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


class Caller:
    """One connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, text: str | bytes) -> None:
        self.writer.write(text.encode() if isinstance(text, str) else text)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        head = await self.within(self.reader.readuntil(b"\r\n\r\n"))
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(one.lower().split(": ", 1) for one in lines if one)

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of the next answer."""
        status, fields = await self.head()
        if "content-length" in fields:
            return status, await self.within(self.reader.readexactly(int(fields["content-length"])))
        body = b""
        while size := int(await self.within(self.reader.readuntil(b"\r\n")), 16):
            body += (await self.within(self.reader.readexactly(size + 2)))[:-2]
        await self.within(self.reader.readexactly(2))
        return status, body

    async def refusal(self) -> tuple[int, str]:
        """Status and message of a refusal in OpenAI's form, behind which the connection ends."""
        status, body = await self.answer()
        assert await self.is_closed()
        return status, json.loads(body)["error"]["message"]

    async def is_closed(self) -> bool:
        """Wait for the end of the connection; False where something comes instead."""
        try:
            return await self.within(self.reader.read(1)) == b""
        except ConnectionError:
            return True

    async def within(self, coming: Coroutine[Any, Any, bytes]) -> bytes:
        """What comes, if it comes before the deadline."""
        return await asyncio.wait_for(coming, DEADLINE_S)

    def hang_up(self) -> None:
        self.writer.transport.abort()


def patient(**more: Any) -> EdgeLimits:
    """Limits that only a clock that jumps exceeds, on however slow a machine."""
    longest = dict.fromkeys(("head_s", "body_s", "unread_s", "handshake_s"), 600.0)
    return EdgeLimits(**{**longest, **more})


class Rig:
    """A door and its callers. Time passes for connections where a test says so, and only there."""

    def __init__(self, door: ApiServer, app: Application, address: tuple[str, int]) -> None:
        self.door, self.app, self.address = door, app, address
        self.edge: Edge = door._edge
        self.limits = self.edge.limits
        self._callers: list[Caller] = []
        self._sweep = self.edge.sweep
        self.edge.sweep = lambda _now_s: None  # type: ignore[method-assign]

    async def caller(self, source: str = "127.0.0.1") -> Caller:
        reader, writer = await asyncio.open_connection(*self.address, local_addr=(source, 0))
        self._callers.append(Caller(reader, writer))
        return self._callers[-1]

    async def silent(self, number: int, source: str = "127.0.0.1") -> list[Caller]:
        return [await self.caller(source) for _ in range(number)]

    async def ask(self, path: str = "/v1/completions", body: bytes = b"{}") -> tuple[int, bytes]:
        """One request of a client with a key, on a connection of its own."""
        caller = await self.caller()
        head = f"POST {path} HTTP/1.1\r\nHost: d\r\n{KEY}Content-Length: {len(body)}\r\n\r\n"
        await caller.send(head.encode() + body)
        return await caller.answer()

    def later(self, seconds: float) -> None:
        """Let the clock of the connections jump: nothing is waited for."""
        self._sweep(monotonic() + seconds)

    def close(self) -> None:
        for one in self._callers:
            one.hang_up()


NO_TLS = dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_ciphers"))


@contextlib.asynccontextmanager
async def serving(
    limits: EdgeLimits | None = None,
    keys: tuple[str, ...] = ("good",),
    max_requests: int = 64,
    sessions: SessionLimits | None = None,
    guards: Callable[[ASGIApp], ASGIApp] | None = None,
    **tls: Any,
) -> AsyncIterator[Rig]:
    """A door that is open, in the order of layers of ``banaserve.frontdoor.app.guarded``.

    Args:
        guards: Puts other layers around the application than those that look at no body.
    """
    app = Application()
    if guards is not None:
        stack = guards(app)
    else:
        counted = ConcurrencyLimit(BodyLimit(app, 2**20), max_requests)
        known = [TenantKey(key=key) for key in keys]
        stack = KeyMiddleware(WebSocketLimit(counted, sessions), known)
    args = Namespace(
        **{**NO_TLS, **tls},
        ssl_cert_reqs=0,
        uvicorn_log_level="error",
        disable_uvicorn_access_log=True,
    )
    with socket.create_server(("127.0.0.1", 0)) as sock:
        with mock.patch.dict(os.environ, {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600"}):
            door = ApiServer(stack, sock, args, limits or patient())
        rig = Rig(door, app, sock.getsockname())
        closed = await door.open()
        try:
            yield rig
        finally:
            rig.close()
            door.close()
            await asyncio.wait_for(closed, DEADLINE_S)


@contextlib.asynccontextmanager
async def serving_a_stream(limits: EdgeLimits | None = None, **more: Any) -> AsyncIterator[Rig]:
    """As ``serving``; a stream of a client with a key must come to its end, whatever happens."""
    async with serving(limits, **more) as rig:
        known = await rig.caller()
        await known.send(f"POST /v1/stream HTTP/1.1\r\nHost: d\r\n{KEY}Content-Length: 0\r\n\r\n")
        assert (await known.head())[0] == 200
        yield rig
        status, _ = await rig.ask()
        assert status == 200
        rig.app.may_go_on.set()
        body = b""
        while size := int(await known.within(known.reader.readuntil(b"\r\n")), 16):
            body += (await known.within(known.reader.readexactly(size + 2)))[:-2]
        assert body == b"".join(b"data: %d\n\n" % number for number in range(NUM_EVENTS))
