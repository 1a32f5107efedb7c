"""POST requests over HTTP/1.1 whose answers are read as they come, with little work per piece.

A load generator shares the machine with what it measures. aiohttp wakes a task for every piece of a
body; here the socket's callback passes the piece on, so the recorded time is that of its arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

from banaserve.base.errors import UserError

if TYPE_CHECKING:
    import httptools

_MAX_IDLE_S = 2.0
"""Idle time in seconds after which a connection is not reused, since servers close idle ones."""


class HttpExchange:
    """Receiver of one answer while it arrives.

    Subclasses override both methods; an exception from either ends the request with that exception.
    """

    def on_status(self, status: int) -> None:
        """Take the status; called once, before any piece of the body."""

    def on_piece(self, piece: bytes) -> None:
        """Take a piece of the body as it arrives; pieces may end anywhere."""


class HttpStreams:
    """Pool of connections to one server, one for each request in progress.

    Raises:
        UserError: The address is not http:// or https://, or httptools is missing.
    """

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise UserError(f"{base_url} is no address of a server: write http://HOST:PORT")
        if find_spec("httptools") is None:
            raise UserError("the package httptools is missing, which vLLM brings: install it")
        self._is_tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = port or (443 if self._is_tls else 80)
        self._path = parts.path.rstrip("/")
        self._address = parts.netloc.rpartition("@")[2]
        self._idle: list[_Connection] = []

    async def post(
        self, path: str, headers: Mapping[str, str], body: bytes, exchange: HttpExchange
    ) -> None:
        """Send one request and return when its answer has ended; cancelling closes the connection.

        Raises:
            OSError: There is no connection, or it broke before the answer had ended.
        """
        connection = self._reused() or await self._connected()
        try:
            await connection.request(self._head(path, headers, body) + body, exchange)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        else:  # the server has said that it closes, and may wait for the client to do so
            connection.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _head(self, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
        lines = [f"POST {self._path}{path} HTTP/1.1", f"Host: {self._address}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += ["Accept: */*", f"Content-Length: {len(body)}", "", ""]
        return "\r\n".join(lines).encode()

    def _reused(self) -> _Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now_s - connection.idle_from_s < _MAX_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        ssl = True if self._is_tls else None
        _, protocol = await loop.create_connection(_Connection, self._host, self._port, ssl=ssl)
        return protocol


class _Connection(asyncio.Protocol):
    """A connection that handles one request at a time."""

    def __init__(self) -> None:
        self.is_open = False
        self.idle_from_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange = HttpExchange()
        self._ended: asyncio.Future[None] | None = None

    async def request(self, data: bytes, exchange: HttpExchange) -> None:
        import httptools

        assert self._transport is not None
        self._exchange = exchange
        self._parser = httptools.HttpResponseParser(self)
        self._ended = self._loop.create_future()
        self._transport.write(data)
        await self._ended

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        if self._ended is None or self._ended.done() or self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except Exception as error:
            # httptools wraps what a callback raises.
            self._fail(error.__context__ or error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._fail(error or ConnectionError("the server closed the connection"))

    def _fail(self, error: BaseException) -> None:
        if self._ended is not None and not self._ended.done():
            is_protocol = type(error).__module__.startswith("httptools")
            self._ended.set_exception(
                ConnectionError(f"no HTTP: {error}") if is_protocol else error
            )
        self.close()

    # ---- called by the parser

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._exchange.on_status(self._parser.get_status_code())

    def on_body(self, piece: bytes) -> None:
        self._exchange.on_piece(piece)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        assert self._ended is not None
        self.is_open = self.is_open and self._parser.should_keep_alive()
        self.idle_from_s = self._loop.time()
        if not self._ended.done():
            self._ended.set_result(None)
