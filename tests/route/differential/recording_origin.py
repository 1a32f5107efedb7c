"""Recording server: notes every request that reaches it, and answers each with its number."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

PROBES = (b"/health", b"/metrics")
"""Balancers ask for these on their own, so they are answered and not noted."""

STAMP = b"x-passed-on"
"""A proxy in front sets it anew in each request that it passes on."""

_OF_A_HOP = frozenset(
    (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect", STAMP)
)
_MAX_BODY_BYTES = 16 * 1024
_LINE = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+) ([^\s\0]+) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*)")
_SIZE = re.compile(rb"([0-9a-fA-F]{1,16})(?:;[^\r\n]*)?\r\n")


class BrokenRequestError(Exception):
    """The bytes of a request have no certain meaning."""


def _path_of(target: bytes) -> bytes:
    """The path of a target in absolute form, which means the same; any other target as it is."""
    rest = re.sub(rb"^https?://[^/?#]+", b"", target, flags=re.IGNORECASE)
    return rest if rest.startswith(b"/") or rest == target else b"/" + rest


@dataclass(frozen=True)
class Meaning:
    """A request as one of the programs has understood it."""

    method: bytes
    target: bytes
    body: bytes


@dataclass(frozen=True)
class Recorded:
    """A request that has reached the server.

    Attributes:
        serial: Number of its answer, in the order of their coming.
        stamps: Values of the field ``STAMP``.
        fields: Names in small letters, and values, of all that are meant for the server alone.
    """

    meaning: Meaning
    serial: int
    stamps: tuple[bytes, ...]
    is_http10: bool
    keep_alive: bool
    fields: tuple[tuple[bytes, bytes], ...]


class RecordingOrigin:
    """An HTTP/1 server with a parser of its own, which guesses nothing.

    ``as=`` in the query asks for a form of the answer: ``chunked``, ``trailers``, ``close``,
    ``empty``; a length otherwise.

    Attributes:
        records: Whole requests so far.
        broken: Heads without a certain meaning, with the reason and the number of records before.
    """

    def __init__(self) -> None:
        self.records: list[Recorded] = []
        self.broken: list[tuple[str, bytes, int]] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> RecordingOrigin:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def forget_broken(self) -> tuple[int, bool]:
        """Returns how many records came before the first broken request, and if there was none."""
        found = min((at for *_, at in self.broken), default=len(self.records))
        was_none = not self.broken
        self.broken.clear()
        return found, was_none

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        # The other side may leave in mid-request: where its own client did, it must.
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._answer_one(reader, writer):
                pass
        self._writers.discard(writer)
        writer.transport.abort()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether another request may follow."""
        head = await reader.readuntil(b"\r\n\r\n")
        try:
            recorded = await self._read(head, reader)
        except BrokenRequestError as error:
            self.broken.append((str(error), head, len(self.records)))
            return False
        if recorded.meaning.target in PROBES:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            return True
        self.records.append(recorded)
        form = _form(recorded)
        writer.write(b"".join(_answer(recorded, form)))
        await writer.drain()
        if closes := form == b"close" or not recorded.keep_alive:
            writer.write_eof()
            await reader.read()
        return not closes

    async def _read(self, head: bytes, reader: asyncio.StreamReader) -> Recorded:
        first, *lines = head[:-4].split(b"\r\n")
        start = _LINE.fullmatch(first)
        if start is None:
            raise BrokenRequestError("the first line is none")
        fields = [_field(line) for line in lines]
        lengths, codings, hosts, stamps, options = (
            [value for name, value in fields if name == wanted]
            for wanted in (b"content-length", b"transfer-encoding", b"host", STAMP, b"connection")
        )
        if len(lengths) + len(codings) > 1 or (codings and codings[0].lower() != b"chunked"):
            raise BrokenRequestError("the body has no certain end")
        if len(hosts) > 1:
            raise BrokenRequestError("it has two hosts")
        is_http10 = start[3] == b"0"
        if is_http10 and codings:
            raise BrokenRequestError("HTTP/1.0 has no chunks")
        if codings:
            body = await _read_chunks(reader)
        else:
            body = await reader.readexactly(_checked(int(lengths[0]) if lengths else 0))
        option = b",".join(options).lower()
        keep_alive = b"keep-alive" in option if is_http10 else b"close" not in option
        meaning = Meaning(start[1], _path_of(start[2]), body)
        own = tuple(field for field in fields if field[0] not in _OF_A_HOP)
        return Recorded(meaning, len(self.records), tuple(stamps), is_http10, keep_alive, own)


def _checked(num_bytes: int) -> int:
    if num_bytes > _MAX_BODY_BYTES:
        raise BrokenRequestError("the body is longer than any that is sent")
    return num_bytes


def _field(line: bytes) -> tuple[bytes, bytes]:
    match = _FIELD.fullmatch(line)
    if match is None:
        raise BrokenRequestError("a field is none")
    name, value = match[1].lower(), match[2].strip()
    if name == b"content-length" and not value.isdigit():
        raise BrokenRequestError("the length is no number")
    return name, value


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    parts, num_bytes = [], 0
    while True:
        line = await reader.readuntil(b"\r\n")
        match = _SIZE.fullmatch(line)
        if match is None:
            raise BrokenRequestError("the size of a chunk is none")
        size = int(match[1], 16)
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return b"".join(parts)
        num_bytes = _checked(num_bytes + size)
        data = await reader.readexactly(size + 2)
        if not data.endswith(b"\r\n"):
            raise BrokenRequestError("a chunk ends elsewhere")
        parts.append(data[:-2])


def answer_body(recorded: Recorded) -> bytes:
    """The body of the answer, which no other request has."""
    meaning = recorded.meaning
    digest = hashlib.sha256(b"\0".join((meaning.method, meaning.target, meaning.body)))
    return b"%d %b\n" % (recorded.serial, digest.hexdigest().encode())


def _form(recorded: Recorded) -> bytes:
    form = recorded.meaning.target.rpartition(b"?as=")[2]
    return b"" if recorded.is_http10 and form in (b"chunked", b"trailers") else form


def has_body(recorded: Recorded) -> bool:
    """Whether its answer has one."""
    return recorded.meaning.method != b"HEAD" and _form(recorded) != b"empty"


def _answer(recorded: Recorded, form: bytes) -> Iterator[bytes]:
    body = answer_body(recorded)
    status = b"204 No Content" if form == b"empty" else b"200 OK"
    yield b"HTTP/1.1 %b\r\nX-Serial: %d\r\n" % (status, recorded.serial)
    if form == b"close" or not recorded.keep_alive:
        yield b"Connection: close\r\n"
    if form in (b"chunked", b"trailers"):
        yield b"Transfer-Encoding: chunked\r\n"
    elif form not in (b"close", b"empty"):
        yield b"Content-Length: %d\r\n" % len(body)
    yield b"\r\n"
    if not has_body(recorded):
        return
    if form not in (b"chunked", b"trailers"):
        yield body
        return
    for part in (body[:7], body[7:]):
        yield b"%x\r\n%b\r\n" % (len(part), part)
    yield b"0\r\nX-Sum: 1\r\n\r\n" if form == b"trailers" else b"0\r\n\r\n"
