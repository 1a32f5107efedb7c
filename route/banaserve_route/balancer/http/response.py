"""Strict framing of answers in the bytes of a connection (RFC 9112).

Bodies are measured, never copied: a client of HTTP/1.1 gets them with the replica's framing.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from banaserve.base.errors import ProtocolError

MAX_HEAD_BYTES = 64 * 1024
_MAX_SIZE_LINE_BYTES = 18
_MAX_TRAILER_BYTES = 8 * 1024

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_HEAD = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: ([^\r\n\0]*))?\r\n"
    rb"((?:" + _TOKEN + rb":[^\r\n\0]*\r\n)*)\r\n"
)
# The fields that matter to an intermediary, anchored at line starts.
_HOP = re.compile(
    rb"^(connection|keep-alive|proxy-connection|proxy-authenticate|upgrade|te|"
    rb"transfer-encoding|content-length):([^\r]*)\r\n",
    re.IGNORECASE | re.MULTILINE,
)
_KEPT = frozenset((b"transfer-encoding", b"content-length"))
# A path that begins with two slashes would be another server's name.
_LOCATION = re.compile(
    rb"^(location:[ \t]*)(https?://[^/\r]+)(?=/(?![/\\]))", re.IGNORECASE | re.MULTILINE
)
_TRAILER = re.compile(rb"(" + _TOKEN + rb"):[^\r\n\0]*\r\n")
_TRAILER_START = re.compile(rb"(?:" + _TOKEN + rb"(?::[^\r\n\0]*)?)?\r?")
_NO_TRAILERS = frozenset(
    (b"transfer-encoding", b"content-length", b"connection", b"keep-alive", b"upgrade", b"te",
     b"trailer", b"host", b"set-cookie", b"www-authenticate", b"content-type", b"content-encoding",
     b"content-range", b"cache-control")
)  # fmt: skip
"""Fields refused as trailers: a client that merges trailers into the head would read another answer
(RFC 9110, 6.5.1)."""
_DIGITS = re.compile(rb"[0-9]{1,18}")
_EVENTS = re.compile(rb"^content-type:[ \t]*text/event-stream", re.IGNORECASE | re.MULTILINE)
_HEX = re.compile(rb"[0-9a-fA-F]{1,15}")
_SIZE_LINE = re.compile(rb"(?:\r\n)?([0-9a-fA-F]+)\r\n")

NUM_LAST_PARTS, TAIL_BYTES = 4, 4096
"""Numbers of last parts of an answer, and of last bytes, that may state its numbers of tokens: a
part may be a single event, and the last ones of a stream say only that it ends."""


def is_comment(chunk: bytes) -> bool:
    """Return whether ``chunk`` of an event stream is a comment, which keeps idle streams open."""
    return chunk.partition(b"\r\n")[2].startswith(b":")


class BodyEnd(StrEnum):
    """Sign by which a body ends."""

    LENGTH = "length"
    LAST_CHUNK = "last_chunk"
    CLOSE = "close"
    """The end of the connection."""


class Body(Protocol):
    """Framing of a body, which finds the body's end.

    Attributes:
        ends_by: Sign of the body's end.
        is_done: True if the whole body has been fed.
        at_boundary: True if the balancer could insert bytes of its own after those fed so far.
    """

    ends_by: BodyEnd
    is_done: bool

    @property
    def at_boundary(self) -> bool: ...

    def feed(self, data: bytes) -> int:
        """Return how many bytes of ``data`` belong to the body.

        Raises:
            ProtocolError: The framing is broken.
        """
        ...


class LengthBody:
    """Body of a known number of bytes."""

    __slots__ = ("_left", "is_done")
    ends_by = BodyEnd.LENGTH

    def __init__(self, num_bytes: int) -> None:
        self._left = num_bytes
        self.is_done = num_bytes == 0

    @property
    def at_boundary(self) -> bool:
        return False

    def feed(self, data: bytes) -> int:
        num_bytes = len(data)
        if num_bytes < self._left:
            self._left -= num_bytes
            return num_bytes
        used, self._left = self._left, 0
        self.is_done = True
        return used


class UntilClose:
    """Body that ends with its connection."""

    __slots__ = ("is_done",)
    ends_by = BodyEnd.CLOSE

    def __init__(self) -> None:
        self.is_done = False

    @property
    def at_boundary(self) -> bool:
        return False

    def feed(self, data: bytes) -> int:
        return len(data)


class ChunkedBody:
    """Body in the chunked transfer coding; chunk extensions are refused."""

    __slots__ = ("_in_trailers", "_left", "_line", "is_done")
    ends_by = BodyEnd.LAST_CHUNK

    def __init__(self) -> None:
        # Bytes left of the current chunk, including its line end.
        self._left = 0
        self._line = b""
        self._in_trailers = False
        self.is_done = False

    @property
    def at_boundary(self) -> bool:
        return not (self._left or self._line or self._in_trailers or self.is_done)

    def feed(self, data: bytes) -> int:
        num_bytes, at = len(data), self._left
        if at > num_bytes:
            self._left = at - num_bytes
            if at - num_bytes == 1 and data[-1] != 13:
                raise ProtocolError("a chunk does not end where it says")
            return num_bytes
        if at:
            _check_line_end(data, at)
            self._left = 0
        while at < num_bytes:
            if self._line or self._in_trailers:
                return self._feed_lines(data, at)
            end = data.find(b"\r\n", at, at + _MAX_SIZE_LINE_BYTES)
            if end < 0:
                return self._feed_lines(data, at)
            size = _chunk_size(data[at:end])
            if size == 0:
                self._in_trailers = True
                at = end + 2
                continue
            after = end + size + 4
            if after > num_bytes:
                self._left = after - num_bytes
                if self._left == 1 and data[-1] != 13:
                    raise ProtocolError("a chunk does not end where it says")
                return num_bytes
            _check_line_end(data, after)
            at = after
        return num_bytes

    def _feed_lines(self, data: bytes, at: int) -> int:
        """Handle the rare case that a size line or the trailers span more than one read."""
        before = len(self._line)
        line = self._line + data[at:]
        if self._in_trailers:
            return self._feed_trailers(line, at - before, len(data))
        end = line.find(b"\r\n", 0, _MAX_SIZE_LINE_BYTES)
        if end < 0:
            if len(line) >= _MAX_SIZE_LINE_BYTES or not _HEX.fullmatch(line.rstrip(b"\r")):
                raise ProtocolError("bad chunk size")
            self._line = line
            return len(data)
        self._line = b""
        size = _chunk_size(line[:end])
        start = at - before + end + 2
        if size == 0:
            self._in_trailers = True
        else:
            self._left = size + 2
        return start + self.feed(data[start:]) if start < len(data) else len(data)

    def _feed_trailers(self, lines: bytes, offset: int, num_bytes: int) -> int:
        """Check each byte before it is relayed: none may end the answer for the client only."""
        end = _end_of_trailers(lines)
        if end:
            self._line, self.is_done = b"", True
            return offset + end
        if len(lines) > _MAX_TRAILER_BYTES:
            raise ProtocolError("trailers too long")
        self._line = lines
        return num_bytes


class ChunkDecoder:
    """Decoder of a chunked body whose framing ``ChunkedBody`` has checked; it drops trailers."""

    __slots__ = ("_is_done", "_left", "_line")

    def __init__(self) -> None:
        self._left, self._line, self._is_done = 0, b"", False

    def decode(self, data: bytes) -> bytes:
        """Return the bytes of the body in ``data``, the next part of the chunks."""
        data, self._line = self._line + data, b""
        parts, at = [], 0
        while at < len(data) and not self._is_done:
            if self._left:
                parts.append(data[at : at + self._left])
                at += len(parts[-1])
                self._left -= len(parts[-1])
            elif match := _SIZE_LINE.match(data, at):
                at, self._left = match.end(), int(match[1], 16)
                self._is_done = self._left == 0
            else:
                self._line, at = data[at:], len(data)
        return b"".join(parts)


def _end_of_trailers(lines: bytes) -> int:
    """Return the end of the empty line after the trailers; 0 if that line has not arrived.

    Raises:
        ProtocolError: A trailer is not a field, or a field that is not allowed as a trailer.
    """
    at = 0
    while match := _TRAILER.match(lines, at):
        if match[1].lower() in _NO_TRAILERS:
            raise ProtocolError("a trailer is one that belongs into the head")
        at = match.end()
    if lines.startswith(b"\r\n", at):
        return at + 2
    if not _TRAILER_START.fullmatch(lines, at):
        raise ProtocolError("a trailer is no field")
    return 0


def _check_line_end(data: bytes, end: int) -> None:
    """Check that the chunk whose end is at ``end`` of ``data`` ends with a line end."""
    if data[max(end - 2, 0) : end] not in (b"\r\n", b"\n"):
        raise ProtocolError("a chunk does not end where it says")


def _chunk_size(digits: bytes) -> int:
    if not _HEX.fullmatch(digits):
        raise ProtocolError("bad chunk size")
    return int(digits, 16)


@dataclass(slots=True)
class ResponseHead:
    """Head of an answer.

    Attributes:
        lines: Status line and fields for the client, without the fields about the connection and
            without the empty line at the end.
        keep_alive: True if the connection may be used again after the body.
        is_events: True if the body is a chunked stream of server-sent events.
    """

    status: int
    lines: bytes
    body: Body
    keep_alive: bool
    is_events: bool

    def to_client(self, data: bytes, closes: bool) -> bytes:
        """Return the head for the client, followed by the first bytes of the body.

        Args:
            closes: True if the client's connection ends with this answer.
        """
        end = b"Connection: close\r\n\r\n" if closes else b"\r\n"
        return b"%b%b%b" % (self.lines, end, data)


def parse_response_head(head: bytes, to_head: bool = False) -> ResponseHead:
    """Return the parsed ``head``, which ends with an empty line.

    Args:
        to_head: True if the answer is to a HEAD request: no body follows, whatever ``head`` says.

    Raises:
        ProtocolError: ``head`` is not an HTTP/1 head, or the end of its body is uncertain.
    """
    match = _HEAD.fullmatch(head)
    if match is None:
        raise ProtocolError("the answer is not HTTP/1.1")
    minor, digits, reason, fields = match.groups()
    status = int(digits)
    lengths: list[bytes] = []
    codings: list[bytes] = []
    connection, others = b"", False
    for name, padded in _HOP.findall(fields):
        lowered, value = name.lower(), padded.strip(b" \t")
        if lowered == b"content-length":
            lengths.append(value)
        elif lowered == b"transfer-encoding":
            codings.append(value.lower())
        else:
            others = True
            if lowered == b"connection":
                connection += b"," + value.lower()
    body = _body(status, lengths, codings, to_head)
    kept = _HOP.sub(_keep, fields) if others else fields
    if connection and connection not in (b",close", b",keep-alive"):
        kept = without(kept, {name.strip() for name in connection.split(b",")} - _KEPT)
    persists = b"keep-alive" in connection if minor == b"0" else b"close" not in connection
    lines = b"HTTP/1.1 %b %b\r\n%b" % (digits, reason or b"", kept)
    keep_alive = persists and not isinstance(body, UntilClose)
    is_events = isinstance(body, ChunkedBody) and _EVENTS.search(kept) is not None
    return ResponseHead(status, lines, body, keep_alive, is_events)


def without_origin(lines: bytes, origin: bytes) -> bytes:
    """Return a head's ``lines`` with a redirect to ``origin`` (``http://a:1``) as a path alone."""
    return _LOCATION.sub(lambda match: match[1 if match[2] == origin else 0], lines)


def _keep(match: re.Match[bytes]) -> bytes:
    return match[0] if match[1].lower() in _KEPT else b""


def without(fields: bytes, names: Set[bytes]) -> bytes:
    """Return ``fields`` without those of the lower-case ``names``."""
    lines = fields.split(b"\r\n")[:-1]
    kept = [line for line in lines if line.partition(b":")[0].lower() not in names]
    return b"".join(line + b"\r\n" for line in kept)


def _body(status: int, lengths: list[bytes], codings: list[bytes], to_head: bool) -> Body:
    if len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise ProtocolError("the length of the answer is given twice")
    if lengths and not _DIGITS.fullmatch(lengths[0]):
        raise ProtocolError("the length of the answer is no number")
    if codings and codings[0] != b"chunked":
        raise ProtocolError("the answer has a transfer coding other than chunked")
    if to_head or status in (204, 304) or status < 200:
        return LengthBody(0)
    if codings:
        return ChunkedBody()
    return LengthBody(int(lengths[0])) if lengths else UntilClose()
