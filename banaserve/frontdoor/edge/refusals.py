"""Refusals of the front door: answers in OpenAI's error form, a count, and a line in the log."""

from __future__ import annotations

import logging
from http import HTTPStatus

from prometheus_client import Counter
from starlette.requests import Request
from starlette.responses import JSONResponse

from banaserve.base.net.refusal_log import RefusalLog

logger = logging.getLogger(__name__)

REFUSED = Counter(
    "banaserve_refused",
    "Requests and connections that the front door refused, by cause and by the status of the "
    "answer; 0 is a connection that was closed without one",
    ["cause", "status"],
)
_log = RefusalLog(logger.warning)


def error_response(
    status: HTTPStatus,
    message: str,
    headers: dict[str, str] | None = None,
    code: str | None = None,
) -> JSONResponse:
    """Return ``{"error": {message, type, code}}``; without ``code``, the status is the code."""
    said = {"message": message, "type": status.phrase, "param": None, "code": code or status}
    return JSONResponse({"error": said}, status_code=status, headers=headers)


async def answer_engines_died(_: Request, error: Exception) -> JSONResponse:
    """Return a 500 that OpenAI's clients do not retry, unlike other 500 answers."""
    return error_response(
        HTTPStatus.INTERNAL_SERVER_ERROR, str(error), {"x-should-retry": "false"}, "engines_died"
    )


def refuse(
    cause: str, status: HTTPStatus, message: str, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Count a refusal and return the answer to the refused request.

    Args:
        cause: Fixed word for the cause: the metric's label, and the key of the log's rate limit.
    """
    note(cause, status, message)
    return error_response(status, message, headers)


def note(cause: str, status: int, message: str) -> None:
    """Count a refusal, and log it at most once a second for each cause."""
    REFUSED.labels(cause, str(int(status))).inc()
    _log.say(cause, f"refused ({int(status) or 'closed'}): {message}")


def closing_answer(status: HTTPStatus, message: str) -> bytes:
    """Return the bytes of an answer that closes its connection, for use outside an application."""
    body = bytes(error_response(status, message).body)
    again = b"Retry-After: 1\r\n" if status in (429, 503) else b""
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        b"%bConnection: close\r\n\r\n%b" % (status, status.phrase.encode(), len(body), again, body)
    )
