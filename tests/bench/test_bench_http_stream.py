"""Connections of the load generator, against servers that answer as they should and otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.http import HttpExchange, HttpStreams

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"


class Seen(HttpExchange):
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_status(self, status: int) -> None:
        self.status = status

    def on_piece(self, piece: bytes) -> None:
        self.body += piece


@asynccontextmanager
async def answering(
    answer: bytes, on_connect: Callable[[], None] = lambda: None
) -> AsyncIterator[str]:
    """A server that sends ``answer`` for each request whose body ends in ``!``."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        on_connect()
        try:
            while True:
                await reader.readuntil(b"!")
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base"


async def ask(streams: HttpStreams) -> Seen:
    seen = Seen()
    await streams.post("/x", {"A": "b"}, b"hello!", seen)
    return seen


@pytest.mark.parametrize(("answer", "connections"), [(ANSWER, 1), (CLOSING, 3)])
async def test_a_connection_is_used_again_where_the_server_keeps_it(
    answer: bytes, connections: int
) -> None:
    made: list[None] = []
    async with answering(answer, lambda: made.append(None)) as url:
        streams = HttpStreams(url)
        for _ in range(3):
            seen = await ask(streams)
            assert (seen.status, seen.body) == (200, b"ok")
        streams.close()
    assert len(made) == connections


@pytest.mark.parametrize(
    "answer", [b"what?\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"]
)
async def test_what_is_not_http(answer: bytes) -> None:
    async with answering(answer) as url:
        with pytest.raises(ConnectionError, match="no HTTP"):
            await ask(HttpStreams(url))


async def test_what_a_callback_raises_ends_the_request() -> None:
    class Refusing(HttpExchange):
        def on_piece(self, piece: bytes) -> None:
            raise ValueError("not this")

    async with answering(ANSWER) as url:
        with pytest.raises(ValueError, match="not this"):
            await HttpStreams(url).post("/x", {}, b"!", Refusing())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match="no address"):
        HttpStreams(url)
