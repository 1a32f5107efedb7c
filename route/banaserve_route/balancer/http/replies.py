"""Answers of the balancer itself, in the form that OpenAI's clients read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


def error_body(status: int, why: str) -> bytes:
    """Return the JSON of an error in one line."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode(
        {"error": {"message": why, "type": kind, "param": None, "code": status}}
    )


def error(status: int, why: str, *, closes: bool, retry_after_s: float | None = None) -> bytes:
    """Return a complete error answer.

    Args:
        closes: True if the connection ends with this answer.
        retry_after_s: Time until the client may try again, in seconds, rounded up; None for none.
    """
    fields = b"WWW-Authenticate: Bearer\r\n" if status == 401 else b""
    if retry_after_s is not None:
        fields += b"Retry-After: %d\r\n" % max(1, math.ceil(retry_after_s))
    return answer(status, b"application/json", error_body(status, why), closes, fields)


def models(names: Sequence[str]) -> bytes:
    """Return the JSON of a list of models."""
    each = [
        {"id": name, "object": "model", "created": 0, "owned_by": "banaserve"} for name in names
    ]
    return msgspec.json.encode({"object": "list", "data": each})


def answer(
    status: int, content_type: bytes, body: bytes, closes: bool, fields: bytes = b""
) -> bytes:
    """Return a complete answer with ``body``."""
    phrase = HTTPStatus(status).phrase.encode()
    if closes:
        fields += b"Connection: close\r\n"
    return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
        status, phrase, content_type, len(body), fields, body,
    )  # fmt: skip


def error_event(why: str) -> bytes:
    """Return the end of a chunked event stream that broke off: an error event and the last chunk.

    Clients raise the error; without it, a broken stream would look like one that has ended.
    """
    event = b"data: %b\n\n" % error_body(502, why)
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event)
