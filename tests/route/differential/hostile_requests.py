"""Bytes of clients: ordinary requests with what they mean, hostile ones, and seeded changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from recording_origin import Meaning

_HEAD = b"POST /v1/x HTTP/1.1\r\nHost: b\r\n"
_CHUNKED = _HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
_NEXT = b"GET /v1/smuggled HTTP/1.1\r\nHost: b\r\n\r\n"
"""In some of the hostile bytes it is part of a body, or a request, as one reads them."""


@dataclass(frozen=True)
class Ordinary:
    """Bytes of sound requests.

    Attributes:
        meanings: The only right ones; a program may refuse some, never read others.
        closes: The connection ends with the last of them.
    """

    data: bytes
    meanings: tuple[Meaning, ...]
    closes: bool = False


def _get(target: bytes, method: bytes = b"GET") -> Ordinary:
    data = b"%b %b HTTP/1.1\r\nHost: b\r\n\r\n" % (method, target)
    return Ordinary(data, (Meaning(method, target, b""),))


def _post(body: bytes, fields: bytes = b"", method: bytes = b"POST") -> Ordinary:
    head = b"%b /v1/x HTTP/1.1\r\nHost: b\r\nContent-Length: %d\r\n" % (method, len(body))
    return Ordinary(head + fields + b"\r\n" + body, (Meaning(method, b"/v1/x", body),))


def _chunked(lines: bytes, body: bytes) -> Ordinary:
    return Ordinary(_CHUNKED + lines, (Meaning(b"POST", b"/v1/x", body),))


def _together(*parts: Ordinary) -> Ordinary:
    meanings = tuple(meaning for part in parts for meaning in part.meanings)
    return Ordinary(b"".join(part.data for part in parts), meanings)


_POST_X = (Meaning(b"POST", b"/v1/x", b"ab"),)

ORDINARY = {
    "get": _get(b"/v1/models"),
    "query": _get(b"/v1/models?a=b&c=%20d"),
    "escapes": _get(b"/v1/a%41-._~!$&'()*+,;=:@"),
    "head": _get(b"/v1/models", b"HEAD"),
    "delete": _get(b"/v1/models", b"DELETE"),
    "options": _get(b"/v1/models", b"OPTIONS"),
    "length": _post(b'{"prompt": "hi"}'),
    "put": _post(b"ab", method=b"PUT"),
    "patch": _post(b"ab", method=b"PATCH"),
    "no body": _post(b""),
    "longest body": _post(b"a" * 1000),
    "body like requests": _post(b"ab\r\n\r\n" + _NEXT),
    "every byte": _post(bytes(range(256))),
    "expect": _post(b"ab", b"Expect: 100-continue\r\n"),
    "tabs": _post(b"ab", b"X-A:\t a \t\r\nX-B:\r\nX-C: \xff\xfe\r\n"),
    "odd names": _post(b"ab", b"x_y: 1\r\n!#$%&'*+-.^`|~: 2\r\n"),
    "drops a field": _post(b"ab", b"Connection: X-A\r\nX-A: 1\r\n"),
    "chunks": _chunked(b"1\r\na\r\n0a\r\nbcdefghijk\r\n00\r\n\r\n", b"abcdefghijk"),
    "upper-case size": _chunked(b"A\r\nabcdefghij\r\n0\r\n\r\n", b"abcdefghij"),
    "extensions": _chunked(b'2;a=b;c="d"\r\nab\r\n0;e\r\n\r\n', b"ab"),
    "no chunk": _chunked(b"0\r\n\r\n", b""),
    "trailers": _chunked(b"2\r\nab\r\n0\r\nX-T: 1\r\nX-U: 2\r\n\r\n", b"ab"),
    "chunk like requests": _chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(_NEXT), _NEXT), _NEXT),
    "names in small": Ordinary(
        b"POST /v1/x HTTP/1.1\r\nhost:b\r\ncontent-length:2\r\n\r\nab", _POST_X
    ),
    "empty lines first": Ordinary(b"\r\n" + _post(b"ab").data, _POST_X),
    "old": Ordinary(b"POST /v1/x HTTP/1.0\r\nContent-Length: 2\r\n\r\nab", _POST_X, closes=True),
    "close": Ordinary(
        _post(b"ab", b"Connection: close\r\n").data + _NEXT, _POST_X, closes=True
    ),
    "answer in chunks": _get(b"/v1/x?as=chunked"),
    "answer with trailers": _get(b"/v1/x?as=trailers"),
    "answer without body": _get(b"/v1/x?as=empty"),
    "answer until close": Ordinary(
        b"GET /v1/x?as=close HTTP/1.1\r\nHost: b\r\nConnection: close\r\n\r\n",
        (Meaning(b"GET", b"/v1/x?as=close", b""),),
        closes=True,
    ),
    "head in chunks": _get(b"/v1/x?as=chunked", b"HEAD"),
    "pipelined": _together(
        _post(b"a"), _get(b"/v1/y?as=chunked"), _chunked(b"1\r\nb\r\n0\r\n\r\n", b"b"),
        _get(b"/v1/z", b"HEAD"), _post(b"c"),
    ),
}  # fmt: skip

Field = tuple[bytes, bytes]

OWN_FIELDS: dict[str, tuple[Field, ...]] = {
    "tabs": ((b"x-a", b"a"), (b"x-b", b""), (b"x-c", b"\xff\xfe")),
    "odd names": ((b"x_y", b"1"), (b"!#$%&'*+-.^`|~", b"2")),
    "drops a field": (),
}
"""What of the ordinary requests with fields of their own is for the server."""

_NAME_BYTES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
_VALUE_BYTES = bytes([*range(0x21, 0x7F), *range(0x80, 0x100)])


def with_fields(seed: int, count: int) -> Iterator[tuple[bytes, tuple[Field, ...]]]:
    """``count`` requests with fields that were drawn, and these."""
    draw = random.Random(f"fields {seed}")
    for _ in range(count):
        fields = []
        for _ in range(draw.randrange(1, 9)):
            name = b"x-" + bytes(draw.choices(_NAME_BYTES, k=draw.randrange(1, 20)))
            words = [draw.choices(_VALUE_BYTES, k=draw.randrange(1, 9)) for _ in range(3)]
            value = b" ".join(map(bytes, words[: draw.randrange(4)]))
            fields.append((name, value))
        lines = b"".join(b"%b:%b\r\n" % (name, b" " + value) for name, value in fields)
        yield _post(b"ab", lines).data, tuple(fields)


_FRAMINGS = (
    b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    b"Content-Length: 40\r\nTransfer-Encoding: chunked\r\n",
    b"Content-Length: 4\r\nContent-Length: 40\r\n",
    b"Content-Length: 40\r\nContent-Length: 4\r\n",
    b"Content-Length: 4\r\nContent-Length: 4\r\n",
    b"Content-Length: 4, 40\r\n",
    b"Content-Length: 4,4\r\n",
    b"Content-Length: +4\r\n",
    b"Content-Length: -4\r\n",
    b"Content-Length: 0x4\r\n",
    b"Content-Length: 04\r\n",
    b"Content-Length: 4 0\r\n",
    b"Content-Length: 4;\r\n",
    b"Content-Length: 4\x0b\r\n",
    b"Content-Length: \xd9\xa4\r\n",
    b"Content-Length:\r\n 4\r\n",
    b"Content-Length : 4\r\n",
    b" Content-Length: 4\r\n",
    b"X: a\r\n Content-Length: 4\r\n",
    b"X: a\r\n\tTransfer-Encoding: chunked\r\n",
    b"X: a\nContent-Length: 4\r\n",
    b"X: a\rContent-Length: 4\r\n",
    b"X: a\0\r\nContent-Length: 4\r\n",
    b"Content-Length: 18446744073709551620\r\n",
    b"Content-Length: \r\n",
    b"Content_Length: 4\r\n",
    b"Content-Length\x00: 4\r\n",
    b"Content-Length\xa0: 4\r\n",
    b"\xefContent-Length: 4\r\n",
    b"Transfer-Encoding: xchunked\r\n",
    b"Transfer-Encoding: chunkedx\r\n",
    b"Transfer-Encoding: chunked, identity\r\n",
    b"Transfer-Encoding: identity, chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding: chunked, chunked\r\n",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: identity\r\nContent-Length: 4\r\n",
    b"Transfer-Encoding : chunked\r\n",
    b"Transfer-Encoding:chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Transfer-Encoding: \"chunked\"\r\n",
    b"Transfer-Encoding: CHUNKED\r\n",
    b"Transfer-Encoding: chunked \r\n",
    b"Transfer-Encoding: chunked,\r\n",
    b"Transfer-Encoding: ,chunked\r\n",
    b"Transfer-Encoding: chunked;q=1\r\n",
    b"Transfer-Encoding:\r\n chunked\r\n",
    b"Transfer_Encoding: chunked\r\n",
    b"Transfer-Encoding\t: chunked\r\n",
    b"Transfer-Encoding:\r\n",
    b"Transfer-Encoding: \x00chunked\r\n",
    b"TE: chunked\r\n",
    b"Connection: Content-Length\r\nContent-Length: 40\r\n",
    b"Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n",
    b"Expect: 100-continue\r\nContent-Length: 4\r\n",
    b"Expect: 100-continue, x\r\nContent-Length: 4\r\n",
    b"Host: c\r\nContent-Length: 4\r\n",
    b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 4\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: AA\r\nConnection: Upgrade, HTTP2-Settings\r\n",
    b"",
)  # fmt: skip
_AFTER = b"0\r\n\r\n" + _NEXT

_BAD_CHUNKS = (
    b"2;\nab\r\n0\r\n\r\n",
    b"2\nab\n0\n\n",
    b"2\r\nab0\r\n\r\n",
    b"2\r\nabXX0\r\n\r\n",
    b"2\r\nab\n0\r\n\r\n",
    b"2 \r\nab\r\n0\r\n\r\n",
    b" 2\r\nab\r\n0\r\n\r\n",
    b"2\t;a\r\nab\r\n0\r\n\r\n",
    b"+2\r\nab\r\n0\r\n\r\n",
    b"-2\r\nab\r\n0\r\n\r\n",
    b"0x2\r\nab\r\n0\r\n\r\n",
    b"2_0\r\nab\r\n0\r\n\r\n",
    b"\r\nab\r\n0\r\n\r\n",
    b"2;a\rb\r\nab\r\n0\r\n\r\n",
    b'2;a="\r\nab\r\n0\r\n\r\n',
    b"2;" + b"a" * 2000 + b"\r\nab\r\n0\r\n\r\n",
    b"10000000000000002\r\nab\r\n0\r\n\r\n",
    b"fffffffffffffffe\r\nab\r\n0\r\n\r\n",
    b"000000000000000000000000000000002\r\nab\r\n0\r\n\r\n",
    b"2\r\nab\r\n0\r\nX T: 1\r\n\r\n",
    b"2\r\nab\r\n0\r\nContent-Length: 40\r\n\r\n",
    b"2\r\nab\r\n0\r\nTransfer-Encoding: chunked\r\nHost: c\r\n\r\n",
    b"2\r\nab\r\n0\r\n folded\r\n\r\n",
    b"2\r\nab\r\n0\r\nX: a\n\r\n",
    b"2\r\nab\r\n0\r\n\n",
    b"2\r\nab\r\n0\n\r\n",
    b"2\r\nab\r\n0\r\n",
    b"2\r\nab\r\n0\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    b"2\r\nab\r\n",
)

_STARTS = (
    b"GET http://c/v1/x HTTP/1.1\r\n",
    b"GET http://b/v1/x HTTP/1.1\r\n",
    b"GET //v1/x HTTP/1.1\r\n",
    b"GET /v1/../x HTTP/1.1\r\n",
    b"GET /v1/%2e%2e/x HTTP/1.1\r\n",
    b"GET /v1/x#y HTTP/1.1\r\n",
    b"GET /v1/x%00 HTTP/1.1\r\n",
    b"GET /v1/\xff\xfe HTTP/1.1\r\n",
    b"GET /v1/x y HTTP/1.1\r\n",
    b"GET  /v1/x HTTP/1.1\r\n",
    b"GET\t/v1/x\tHTTP/1.1\r\n",
    b"GET /v1/x HTTP/1.1 \r\n",
    b"GET /v1/x HTTP/1.1\n",
    b"GET /v1/x\r\n",
    b"GET /v1/x HTTP/0.9\r\n",
    b"GET /v1/x HTTP/1.2\r\n",
    b"GET /v1/x HTTP/2.0\r\n",
    b"GET /v1/x HTTP/01.1\r\n",
    b"GET /v1/x http/1.1\r\n",
    b"get /v1/x HTTP/1.1\r\n",
    b"FROB /v1/x HTTP/1.1\r\n",
    b"G\0T /v1/x HTTP/1.1\r\n",
    b"CONNECT b:80 HTTP/1.1\r\n",
    b"TRACE /v1/x HTTP/1.1\r\n",
    b"OPTIONS * HTTP/1.1\r\n",
    b"PRI * HTTP/2.0\r\n",
    b"SOURCE /v1/x HTTP/1.1\r\n",
    b"M-SEARCH /v1/x HTTP/1.1\r\n",
    b" GET /v1/x HTTP/1.1\r\n",
    b"\nGET /v1/x HTTP/1.1\r\n",
    b"\0GET /v1/x HTTP/1.1\r\n",
    b"GET /v1/" + b"a" * 40_000 + b" HTTP/1.1\r\n",
    b"GET /v1/x HTTP/1.0\r\nConnection: keep-alive\r\n",
    b"POST /v1/x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n",
    b"POST /v1/x HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n",
    b"POST /v1/x HTTP/1.0\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n",
    b"HEAD /v1/x HTTP/1.1\r\nContent-Length: 4\r\n",
    b"GET /v1/x HTTP/1.1\r\nContent-Length: 46\r\n",
    b"GET /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
    b"DELETE /v1/x HTTP/1.1\r\nContent-Length: 4\r\n",
    b"OPTIONS /v1/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n",
)

_FIELDS = (
    b"X" * 40_000 + b": a\r\n",
    b"X: " + b"a" * 40_000 + b"\r\n",
    b"".join(b"X-%d: a\r\n" % number for number in range(200)),
    b"X: a\x01b\x7f\r\n",
    b"X\x7f: a\r\n",
    b"X(y): a\r\n",
    b": a\r\n",
    b"X\r\n",
    b"X y: a\r\n",
    b"Host: c\r\n",
    b"X-Passed-On: me\r\n",
    b"Connection: close, Host\r\n",
    b"Connection: keep-alive, close\r\n",
    b"Keep-Alive: timeout=5\r\nProxy-Connection: close\r\n",
    b"Trailer: Content-Length\r\n",
    b"X-HTTP-Method-Override: DELETE\r\n",
)


def hostile() -> list[bytes]:
    """Every hostile sequence, each followed by another request."""
    return [
        *(_HEAD + framing + b"\r\n" + _AFTER for framing in _FRAMINGS),
        *(_CHUNKED + chunks + _NEXT for chunks in _BAD_CHUNKS),
        *(start + b"Host: b\r\n\r\n" + _AFTER for start in _STARTS),
        *(b"GET /v1/x HTTP/1.1\r\nHost: b\r\n" + field + b"\r\n" + _NEXT for field in _FIELDS),
        b"GET /v1/x HTTP/1.1\r\n\r\n" + _NEXT,
        b"\r\n" * 300 + _NEXT,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        _NEXT * 40,
    ]


def changed(seed: int, num_cases: int, seeds: list[bytes]) -> Iterator[bytes]:
    """Files of the corpus ``seeds``, ordinary and hostile requests, changed in up to four places.

    The same for the same seed.
    """
    draws = random.Random(seed)
    known = [*seeds, *(one.data for one in ORDINARY.values()), *hostile()]
    known = [data for data in known if len(data) < 4_000]
    for _ in range(num_cases):
        data = draws.choice(known)
        for _ in range(draws.randint(1, 4)):
            data = draws.choice(_CHANGES)(draws, data, known)
        yield data


def _edit(draws: random.Random, data: bytes, _: list[bytes]) -> bytes:
    at = draws.randint(0, len(data))
    piece = draws.choice(_PIECES)
    return data[:at] + piece + data[at + draws.choice((0, 0, 1, len(piece))) :]


def _edit_line(draws: random.Random, data: bytes, known: list[bytes]) -> bytes:
    lines = data.split(b"\r\n")
    at = draws.randrange(len(lines))
    other = draws.choice(draws.choice(known).split(b"\r\n"))
    match draws.choice(("drop", "repeat", "take", "swap", "fold", "bare", "field")):
        case "drop":
            del lines[at]
        case "repeat":
            lines.insert(at, lines[at])
        case "take":
            lines.insert(at, other)
        case "swap":
            lines[at], lines[-1 - at] = lines[-1 - at], lines[at]
        case "fold":
            lines[at] = draws.choice((b" ", b"\t")) + lines[at]
        case "bare":
            lines[at : at + 2] = [draws.choice((b"\n", b"\r")).join(lines[at : at + 2])]
        case "field":
            lines.insert(min(at, 2), draws.choice(_FRAMINGS)[:-2])
    return b"\r\n".join(lines)


def _edit_number(draws: random.Random, data: bytes, _: list[bytes]) -> bytes:
    places = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
    if not places:
        return data
    at = draws.choice(places)
    return data[:at] + draws.choice(_NUMBERS) + data[at + 1 :]


def _follow(draws: random.Random, data: bytes, known: list[bytes]) -> bytes:
    return data + draws.choice(known)


_PIECES = (
    b"\0", b"\t", b" ", b"\n", b"\r", b"\r\n", b"\r\n\r\n", b"\x0b", b"\x85", b"\xa0", b"\xff",
    b":", b",", b";", b'"', b"0", b"0\r\n\r\n", b"chunked", b"X: ", b"_", b"-", b"+",
)  # fmt: skip
_NUMBERS = (b"0", b"1", b"9", b"a", b"00", b"40", b"0x1", b"-1", b" ", b"")
_CHANGES: tuple[Callable[[random.Random, bytes, list[bytes]], bytes], ...] = (
    _edit,
    _edit_line,
    _edit_line,
    _edit_number,
    _follow,
)
