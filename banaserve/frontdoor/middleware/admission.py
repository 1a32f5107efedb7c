"""Limits of the front door: requests refused before they are processed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.frontdoor.edge.refusals import refuse

RETRY_AFTER_S = 1


class ConcurrencyLimit:
    """Middleware that answers 429 with Retry-After while ``max_requests`` requests are under way.

    A POST request counts from the last byte of its body: a body that does not arrive blocks no
    other request. A realtime session counts from its beginning.
    """

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_session = scope["type"] == "websocket"
        if not is_session and (scope["type"] != "http" or scope["method"] != "POST"):
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            await self._refusal()(scope, receive, send)
            return
        num_taken = int(is_session or not _has_body(scope))
        self._num_requests += num_taken

        def judge(message: Message) -> Response | None:
            nonlocal num_taken
            if num_taken or message["type"] != "http.request" or message.get("more_body", False):
                return None
            if self._num_requests >= self._max_requests:
                return self._refusal()
            num_taken = 1
            self._num_requests += 1
            return None

        try:
            await _judged(self._app, scope, receive, send, judge)
        finally:
            self._num_requests -= num_taken

    def _refusal(self) -> Response:
        return refuse(
            "requests",
            HTTPStatus.TOO_MANY_REQUESTS,
            f"{self._max_requests} requests are under way; try again shortly",
            {"Retry-After": str(RETRY_AFTER_S)},
        )


class BodyLimit:
    """Middleware that answers 413 to a body too long, and 503 if all bodies together are too large.

    A body's announced length is checked as well as the bytes received.

    Args:
        max_bytes: Maximum size of one body.
        max_held_bytes: Maximum size of the received parts of the bodies of all requests under way;
            None for no limit.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_held_bytes: int | None = None) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        refusal = self._refusal(int(announced), int(announced)) if announced.isdigit() else None
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        num_bytes = 0

        def judge(message: Message) -> Response | None:
            nonlocal num_bytes
            came = len(message.get("body", b""))
            num_bytes += came
            self._held_bytes += came
            return self._refusal(num_bytes)

        try:
            await _judged(self._app, scope, receive, send, judge)
        finally:
            self._held_bytes -= num_bytes

    def _refusal(self, num_bytes: int, num_more: int = 0) -> Response | None:
        """Return the refusal of a body of ``num_bytes``, ``num_more`` of them still to come."""
        if num_bytes > self._max_bytes:
            return refuse(
                "body_size",
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {self._max_bytes} bytes (--max-body-size)",
                {"Connection": "close"},
            )
        if self._max_held_bytes is None or self._held_bytes + num_more <= self._max_held_bytes:
            return None
        return refuse(
            "bodies",
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"requests under way hold {self._max_held_bytes} bytes; try again shortly",
            {"Connection": "close", "Retry-After": str(RETRY_AFTER_S)},
        )


def _has_body(scope: Scope) -> bool:
    return any(
        (name == b"content-length" and value != b"0") or name == b"transfer-encoding"
        for name, value in scope["headers"]
    )


async def _judged(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    judge: Callable[[Message], Response | None],
) -> None:
    """Run ``app`` until ``judge`` returns a refusal for a message that the application receives.

    The application answers the cut-off as a broken body; the refusal replaces that answer.
    """
    started = False
    refusal: Response | None = None

    async def judged() -> Message:
        nonlocal refusal
        message = await receive()
        refusal = refusal or judge(message)
        if refusal is not None:
            raise _CutOffError
        return message

    def watched(message: Message) -> Awaitable[None]:
        nonlocal started
        if not started and refusal is not None:
            return _dropped()
        started = True
        return send(message)  # a part of a stream costs no coroutine here

    try:
        await app(scope, judged, watched)
    except _CutOffError:
        if started:
            raise
    if refusal is not None and not started:
        await refusal(scope, receive, send)


async def _dropped() -> None:
    """Send nothing."""


class _CutOffError(Exception):
    """Error: a body has been refused while it was being received."""
