"""What the front door refuses before any work is done: too much at once, too much in one."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
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
    """Answers 413 to a body of more than ``max_bytes``, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            await self._refuse(scope, receive, send)
            return
        await self._guard(scope, receive, send)

    async def _guard(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count a body that does not say its length, and cut it off where it is too long.

        The application takes the cut for a broken body and answers so; our refusal replaces that.
        """
        num_bytes, started = 0, False

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise _BodyTooLargeError
            return message

        async def watched(message: Message) -> None:
            nonlocal started
            if started or num_bytes <= self._max_bytes:
                started = True
                await send(message)

        try:
            await self._app(scope, counted, watched)
        except _BodyTooLargeError:
            if started:
                raise
        if num_bytes > self._max_bytes and not started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = error_response(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is larger than {self._max_bytes} bytes (--max-body-size)",
            {"Connection": "close"},
        )
        await refusal(scope, receive, send)


class _BodyTooLargeError(Exception):
    """More bytes came than are allowed."""
