"""Limits of the front door: requests refused before any work is done on them."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.api.errors import error_response

RETRY_AFTER_S = 1


class ConcurrencyLimit:
    """Answers 429 with Retry-After while ``max_requests`` POST requests are under way."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._num_requests >= self._max_requests:
            refusal = error_response(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{self._max_requests} requests are under way; try again shortly",
                {"Retry-After": str(RETRY_AFTER_S)},
            )
            await refusal(scope, receive, send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1


class BodyLimit:
    """Answers 413 to a body that is too long, announced or not, and 503 to one that is too much.

    Args:
        max_bytes: Of one body.
        max_held_bytes: Of the bodies of all requests under way, as far as they have come.
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
        await self._guard(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a body that does not say its length, and cut it off where it is too long.

        The application takes the cut for a broken body and answers so; our refusal replaces that.
        """
        num_bytes, started = 0, False
        refusal: Response | None = None

        async def counted() -> Message:
            nonlocal num_bytes, refusal
            message = await receive()
            came = len(message.get("body", b""))
            num_bytes += came
            self._held_bytes += came
            refusal = refusal or self._refusal(num_bytes)
            if refusal is not None:
                raise _CutOffError
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if started or refusal is None:
                started = True
                await send(message)

        try:
            await self._app(scope, counted, watched)
        except _CutOffError:
            if started:
                raise
        finally:
            self._held_bytes -= num_bytes
        if refusal is not None and not started:
            await refusal(scope, receive, send)

    def _refusal(self, num_bytes: int, num_more: int = 0) -> Response | None:
        """What is answered to a body of ``num_bytes``, of which ``num_more`` are still to come."""
        if num_bytes > self._max_bytes:
            return error_response(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {self._max_bytes} bytes (--max-body-size)",
                {"Connection": "close"},
            )
        if self._max_held_bytes is None or self._held_bytes + num_more <= self._max_held_bytes:
            return None
        return error_response(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"requests under way hold {self._max_held_bytes} bytes; try again shortly",
            {"Connection": "close", "Retry-After": str(RETRY_AFTER_S)},
        )


class _CutOffError(Exception):
    """More bytes came than are allowed."""
