"""Client request as parsed, and its bytes for a replica."""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from banaserve.base.errors import BanaServeError

MAX_FIELDS = 128
MAX_HEAD_BYTES = 32 * 1024
_RETRY_AFTER_S = 1.0

# Fields about the connection, or created anew for the next connection.
_DROPPED = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te", b"trailer",
     b"transfer-encoding", b"content-length", b"expect", b"host", b"upgrade")
)  # fmt: skip
_OURS = b"x-banaserve-"
_SEEN = frozenset((b"authorization", b"traceparent", b"tracestate", b"x-session-id"))
_PASSED = frozenset(
    (b"tracestate", b"x-session-id", b"x-banaserve-keep", b"x-banaserve-slo-tpot",
     b"x-banaserve-slo-ttft")
)  # fmt: skip
_JOINED_BYTES = 16 * 1024
"""Size of a body up to which one copy is cheaper than one more buffer to send."""
_MANY_PARTS, _PART_BYTES = 256, 64
_KEPT_TARGETS = 64
"""Number of targets that are read once: nearly all requests have one of a few."""

_ODD_PATH = re.compile(rb"//|/\.\.?(?:/|$)|[\\\0-\x20]")
_ORIGIN = re.compile(rb"https?://[^/?#\s\\]+", re.IGNORECASE)
"""Beginning of a target in absolute form, which every server must accept (RFC 9112, 3.2.2)."""
_TARGET = re.compile(rb"/[A-Za-z0-9\-._~!$&'()*+,;=:@%/]*(?:\?[^\s#\\\0]*)?")


class RequestRefusedError(BanaServeError):
    """The balancer itself refuses the request: no replica is asked.

    Attributes:
        closes: True if the following bytes on the connection cannot be trusted.
        retry_after_s: Time until the client may try again, in seconds; None for none.
    """

    def __init__(
        self, status: int, why: str, closes: bool = True, retry_after_s: float | None = None
    ) -> None:
        """``retry_after_s`` is a second by default, for the statuses 429 and 503."""
        super().__init__(why)
        self.status = status
        self.closes = closes
        usual_s = _RETRY_AFTER_S if status in (429, 503) else None
        self.retry_after_s = usual_s if retry_after_s is None else retry_after_s


@lru_cache(_KEPT_TARGETS)
def _read_target(target: bytes) -> tuple[bytes, bytes]:
    """Return a request's target without an origin, and its decoded path.

    Raises:
        RequestRefusedError: The target is not one that may be passed on.
    """
    if (origin := _ORIGIN.match(target)) is not None:
        rest = target[origin.end() :]
        target = rest if rest.startswith(b"/") else b"/" + rest
    if not _TARGET.fullmatch(target):
        raise RequestRefusedError(400, "the request's target is not a path")
    # A replica may read an odd path differently from the check against allowed paths.
    path = target.partition(b"?")[0]
    path = unquote_to_bytes(path) if b"%" in path else path
    if _ODD_PATH.search(path):
        raise RequestRefusedError(400, "the path is not in its simplest form")
    return target, path


class ClientRequest:
    """Request of a client, filled in by the parser's callbacks in the order of the bytes.

    Attributes:
        target: Path and query, as sent.
        path: Path without the query, percent-decoded.
        fields: Header lines for the replica, each with its line end.
        seen: Values of the fields that the balancer itself reads, by lower-case name.
        keep_alive: True if the connection may carry another request after this one.
    """

    __slots__ = (
        "_connection",
        "_head_bytes",
        "_is_chunked",
        "_num_fields",
        "_num_hosts",
        "_size",
        "_target",
        "announced_bytes",
        "body",
        "expects_continue",
        "fields",
        "is_http10",
        "keep_alive",
        "method",
        "path",
        "seen",
    )

    def __init__(self) -> None:
        self._target = b""
        self._connection = b""
        self._head_bytes = self._num_fields = self._num_hosts = self._size = 0
        self.announced_bytes = 0
        self.method = self.path = b""
        self.fields: list[bytes] = []
        self.seen: dict[bytes, bytes] = {}
        self.body: list[bytes] = []
        self.keep_alive = False
        self.is_http10 = self.expects_continue = self._is_chunked = False

    @property
    def target(self) -> bytes:
        return self._target

    @property
    def size(self) -> int:
        """Return the number of bytes of the body so far."""
        return self._size

    @property
    def framing(self) -> bytes:
        """Return the header line that says where the body ends."""
        if self._is_chunked:
            return b"Transfer-Encoding: chunked\r\n"
        return b"Content-Length: %d\r\n" % self.announced_bytes

    @property
    def has_body(self) -> bool:
        """True if the head says that a body follows."""
        return self.announced_bytes > 0 or self._is_chunked

    @property
    def is_preflight(self) -> bool:
        """True for a question without a body, which browsers ask before they send a key (CORS)."""
        return self.method == b"OPTIONS" and not self.has_body

    @property
    def session(self) -> str:
        """Return the session that the client names; empty if it names none."""
        return self.seen.get(b"x-session-id", b"")[:256].decode("latin-1")

    def add_url(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise RequestRefusedError(431, f"the head exceeds {MAX_HEAD_BYTES} bytes")
        self._target += part

    def add_field(self, name: bytes, value: bytes) -> None:
        """Add one header field.

        Raises:
            RequestRefusedError: There are too many fields, or the field is not supported or makes
                the request ambiguous.
        """
        self._num_fields += 1
        self._head_bytes += len(name) + len(value)
        if self._num_fields > MAX_FIELDS or self._head_bytes > MAX_HEAD_BYTES:
            raise RequestRefusedError(
                431, f"more than {MAX_FIELDS} fields or {MAX_HEAD_BYTES} bytes"
            )
        lowered = name.lower()
        if lowered in _DROPPED:
            self._read_dropped(lowered, value)
        elif lowered in _SEEN or lowered.startswith(_OURS):
            self._read_seen(name, lowered, value)
        else:
            self.fields.append(b"%b: %b\r\n" % (name, value))

    def _read_seen(self, name: bytes, lowered: bytes, value: bytes) -> None:
        before = self.seen.get(lowered)
        if before is not None and lowered != b"tracestate":  # of which there may be several
            raise RequestRefusedError(
                400, f"the header field {name.decode('latin-1')} is there twice"
            )
        self.seen[lowered] = value if before is None else b"%b,%b" % (before, value)
        if lowered in _PASSED:
            self.fields.append(b"%b: %b\r\n" % (name, value))

    def _read_dropped(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                raise RequestRefusedError(400, "Content-Length is no number")
            self.announced_bytes = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise RequestRefusedError(501, "Transfer-Encoding is not chunked")
            self._is_chunked = True
        elif name == b"host":
            self._num_hosts += 1
        elif name == b"upgrade":
            if value.strip().lower() == b"h2c":  # ignored, as RFC 9110, 7.8, allows
                return
            raise RequestRefusedError(
                501, "upgrades of the connection are not supported: HTTP/1.1 only"
            )
        elif name == b"expect":
            if value.lower() != b"100-continue":
                raise RequestRefusedError(417, "Expect is not 100-continue")
            self.expects_continue = True
        elif name == b"connection":
            self._connection += b"," + value.lower()

    def head_complete(self, method: bytes, version: str, keep_alive: bool) -> None:
        """Check the head as a whole.

        Raises:
            RequestRefusedError: The head is not one that may be passed on.
        """
        self.method = method
        if version not in ("1.1", "1.0"):
            raise RequestRefusedError(505, "HTTP/1.1 only")
        self.is_http10 = version == "1.0"
        # RFC 9112, 9.3: clients of HTTP/1.0 and proxies do not agree on when a connection persists.
        self.keep_alive = keep_alive and not self.is_http10
        if self._num_hosts > 1 or (self._num_hosts == 0 and not self.is_http10):
            raise RequestRefusedError(400, "exactly one Host header field is needed")
        if self.is_http10 and self._is_chunked:
            # RFC 9112, 6.1: an intermediary may have framed the message differently.
            raise RequestRefusedError(400, "HTTP/1.0 has no Transfer-Encoding")
        if self.is_http10 and self.expects_continue:
            self.expects_continue = False
        if method in (b"CONNECT", b"TRACE"):
            raise RequestRefusedError(405, f"{method.decode()} is not supported")
        self._target, self.path = _read_target(self._target)
        if self._connection and self._connection not in (b",keep-alive", b",close"):
            self._drop_named()

    def _drop_named(self) -> None:
        """Drop the fields that the Connection field names: they are not for the next hop."""
        names = {name.strip() for name in self._connection.split(b",")}
        self.fields = [line for line in self.fields if line.partition(b":")[0].lower() not in names]

    def add_body(self, data: bytes, max_bytes: int) -> None:
        """Add a part of the body.

        Raises:
            RequestRefusedError: The body is longer than ``max_bytes``.
        """
        self._size += len(data)
        if self._size > max_bytes:
            raise RequestRefusedError(
                413, f"the body is larger than {max_bytes} bytes (--max-body-size)"
            )
        body = self.body
        body.append(data)
        if len(body) >= _MANY_PARTS and self._size < _PART_BYTES * len(body):
            # Chunks of a few bytes would need many times the memory that is counted.
            self.body = [b"".join(body)]

    def parts(self, fields_for_target: bytes) -> list[bytes]:
        """Return the bytes for a replica, framed anew: both ends agree on where the body ends.

        Args:
            fields_for_target: Header lines that only this hop needs: Host, keys.
        """
        start = b"%b %b HTTP/1.1\r\n" % (self.method, self._target)
        if not self.body and self.method in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            return [b"".join((start, fields_for_target, *self.fields, b"\r\n"))]
        length = b"Content-Length: %d\r\n\r\n" % self._size
        head = b"".join((start, fields_for_target, *self.fields, length))
        if self._size <= _JOINED_BYTES:
            return [b"".join((head, *self.body))]
        return [head, *self.body]
