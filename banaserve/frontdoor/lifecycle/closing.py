"""End of a server: it accepts no more requests and lets those under way end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from http import HTTPStatus

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.frontdoor.edge.edge import path_of
from banaserve.frontdoor.edge.refusals import error_response

_RETRY_AFTER_S = 1
_READY = "/ready"
_POLL_S = 0.02


class StopSignals:
    """Stop signals: SIGTERM ends the server after its requests, SIGINT or a second signal at once.

    Must be created on the event loop.

    Attributes:
        stop: Event set once a signal has come.
        now: Event set once the server is to end without waiting for its requests.
    """

    def __init__(self) -> None:
        self.stop, self.now = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _terminate(self) -> None:
        if self.stop.is_set():
            self.now.set()
        self.stop.set()

    def _interrupt(self) -> None:
        self.now.set()
        self.stop.set()


class ClosingMiddleware:
    """Middleware that counts requests under way and, once closing, refuses new ones with 503.

    ``/ready`` is answered 503 too.

    Attributes:
        num_requests: Number of POST requests under way, streams until their last byte.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_requests = 0
        self._is_closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http" and scope["method"] == "POST"
        if self._is_closing and scope["type"] == "http":
            if path_of(scope) == _READY:
                answer = JSONResponse({"ready": False, "closing": True}, 503)
                await answer(scope, receive, send)
                return
            if is_request:
                refusal = error_response(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "the server is about to end; send the request to another one",
                    {"Connection": "close", "Retry-After": str(_RETRY_AFTER_S)},
                )
                await refusal(scope, receive, send)
                return
        if not is_request:
            await self._app(scope, receive, send)
            return
        self.num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.num_requests -= 1

    async def close(
        self, timeout_s: float, now: asyncio.Event, serves: Callable[[], object]
    ) -> None:
        """Accept no more requests; return when the last one has ended, or the time is over.

        Args:
            now: Event that ends the waiting.
            serves: Returns something true while an instance is left to serve the requests.
        """
        self._is_closing = True
        await until_none(lambda: self.num_requests, timeout_s, now, serves)


async def until_none(
    count: Callable[[], int], timeout_s: float, now: asyncio.Event, serves: Callable[[], object]
) -> None:
    """Wait until ``count`` returns 0, the time is over, ``now`` is set or ``serves`` is false.

    Args:
        now: Event that ends the waiting.
        serves: Returns something true while an instance is left to serve what is counted.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s

    def is_over() -> bool:
        has_time = loop.time() < deadline_s and not now.is_set()
        return not (count() and serves() and has_time)

    while not is_over():  # noqa: ASYNC110 - of these four only one is an event
        await asyncio.sleep(_POLL_S)


class LastAnswers:
    """Middleware that, once retired, tells clients to close their connections after the answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.is_retired = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.is_retired or scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_last)
