"""Client that sends bytes as they are, and takes the bytes that come back apart."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

from recording_origin import Recorded, answer_body, has_body

LAST = b"GET /v1/last HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n"
"""Follows whatever is sent: its answer ends the connection."""

FILLING = b"Z" * 48 * 1024
"""Ends every head and every body by its size, and is neither a line nor a number."""

_PATIENCE_S = 0.5
_WAIT_S = 60.0
"""Only a test that fails waits this long."""
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?: [^\r\n]*)?")


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        status: 0 where it has no head.
        serial: The origin's number; None where a program on the way has answered.
    """

    status: int
    serial: int | None
    body: bytes


class _Kept(asyncio.Protocol):
    """Keeps what comes, also where the connection is reset after it."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


async def exchange(port: int, data: bytes) -> bytes:
    """Returns everything that comes back for ``data``, until the other side closes.

    Where it waits for more, it gets ``FILLING``, so that every exchange ends.

    Raises:
        AssertionError: This one does not.
    """
    loop = asyncio.get_running_loop()
    made, kept = await loop.create_connection(_Kept, "127.0.0.1", port)
    transport = cast(asyncio.Transport, made)
    transport.write(data + LAST)
    if not await _ended(kept, _PATIENCE_S):
        transport.write(FILLING)
        assert await _ended(kept, _WAIT_S), f"port {port} does not close: {bytes(kept.data)!r}"
    transport.abort()
    return bytes(kept.data)


async def _ended(kept: _Kept, patience_s: float) -> bool:
    try:
        async with asyncio.timeout(patience_s):
            await kept.ended.wait()
    except TimeoutError:
        return False
    return True


def read_answers(raw: bytes, recorded: Callable[[int], Recorded]) -> list[Answer]:
    """Take ``raw`` apart into answers; each of the origin's is the whole one to its request.

    Raises:
        AssertionError: They are no answers, or one is not that of its request.
    """
    return list(_answers(raw, recorded))


def _answers(raw: bytes, recorded: Callable[[int], Recorded]) -> Iterator[Answer]:
    while raw:
        if not raw.startswith(b"HTTP/"):
            # To what may have been HTTP/0.9, whose answers have no head.
            yield Answer(0, None, raw)
            return
        head, end, rest = raw.partition(b"\r\n\r\n")
        assert end, raw
        first, *lines = head.split(b"\r\n")
        status = _STATUS.fullmatch(first)
        assert status is not None, raw
        fields = dict(_named(line) for line in lines)
        if status[1].startswith(b"1"):
            raw = rest
            continue
        if (serial := fields.get(b"x-serial")) is None:
            # To HEAD, and there a length says nothing of what follows.
            size = 0 if rest.startswith(b"HTTP/") else int(fields.get(b"content-length", 2**30))
            yield Answer(int(status[1]), None, rest[:size])
            raw = rest[size:]
            continue
        asked = recorded(int(serial))
        body, raw = _body(fields, rest) if has_body(asked) else (b"", rest)
        assert not has_body(asked) or body == answer_body(asked), (asked, body)
        yield Answer(int(status[1]), asked.serial, body)


def _named(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.lower(), value.strip()


def _body(fields: dict[bytes, bytes], rest: bytes) -> tuple[bytes, bytes]:
    if fields.get(b"transfer-encoding") == b"chunked":
        return _chunks(rest)
    size = int(fields[b"content-length"]) if b"content-length" in fields else len(rest)
    return rest[:size], rest[size:]


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, _, rest = rest.partition(b"\r\n")
        if not (size := int(line, 16)):
            break
        body += rest[:size]
        assert rest[size : size + 2] == b"\r\n", rest
        rest = rest[size + 2 :]
    while line:
        line, _, rest = rest.partition(b"\r\n")
    return body, rest
