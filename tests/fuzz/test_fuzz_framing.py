"""Bytes of clients at the balancer: each is answered, or waited for, and its clock goes on."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

from hypothesis import given

from banaserve_route.balancer.http.client_connection import ClientConnection, RequestHandler
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError
from corpus import ends, fuzzed, spoiled

_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]+\r\n")
_REFUSALS = {400, 405, 408, 413, 417, 429, 431, 501, 503, 505}
_MAX_BODY_BYTES = 4_096


class Handler(RequestHandler):
    """Answers each request with its length."""

    max_body_bytes = _MAX_BODY_BYTES
    body_timeout_s = 60.0

    def __init__(self) -> None:
        self.held_bytes = 0
        self.taken: list[ClientRequest] = []
        self.refusals: list[int] = []

    def opened(self, client: ClientConnection) -> bool:
        return True

    def closed(self, client: ClientConnection) -> None:
        pass

    def check_head(self, client: ClientConnection, message: ClientRequest) -> None:
        pass

    def dropped(self, cause: str, why: str) -> None:
        pass

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes

    def take(self, client: ClientConnection, message: ClientRequest) -> None:
        self.taken.append(message)
        client.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        client.done(message)

    def refused(self, error: RequestRefusedError) -> None:
        self.refusals.append(error.status)


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"socket": SimpleNamespace(setsockopt=lambda *_: None)})
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.is_closed = True

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


@fuzzed
@given(spoiled("framing"))
def test_every_byte_sequence_is_taken_or_refused(data: bytes) -> None:
    async def feed(step: int) -> Handler:
        handler, transport = Handler(), Transport()
        connection = ClientConnection(handler)
        connection.connection_made(transport)
        for start in range(0, len(data), step):
            connection.data_received(data[start : start + step])
            await asyncio.sleep(0)
        statuses = [int(status) for status in _STATUS.findall(transport.written)]
        assert set(statuses) <= _REFUSALS | {100, 200}
        assert len(handler.refusals) <= 1
        assert set(handler.refusals) <= _REFUSALS
        if handler.refusals:
            # What follows cannot be trusted: nothing else is taken.
            assert transport.is_closed
            was_last = bool(handler.taken) and not handler.taken[-1].keep_alive
            assert statuses[-1] == handler.refusals[0] or was_last
        assert all(message.size <= _MAX_BODY_BYTES for message in handler.taken)
        connection.connection_lost(None)
        assert handler.held_bytes == 0
        return handler

    with ends():
        whole, by_bytes = asyncio.run(feed(len(data) or 1)), asyncio.run(feed(7))
    # However the bytes arrive they are the same requests, each of which goes on as one.
    assert _framed(whole)[: len(by_bytes.taken)] == _framed(by_bytes)[: len(whole.taken)]
    for framed in _framed(whole):
        assert len(re.findall(rb"(?im)^(?:content-length|transfer-encoding):", framed)) <= 1
        assert framed.count(b"\r\n\r\n") >= 1


def _framed(handler: Handler) -> list[bytes]:
    """The heads as they would go on to a replica."""
    wholes = [b"".join(message.parts(b"Host: r\r\n")) for message in handler.taken]
    return [whole.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" for whole in wholes]
