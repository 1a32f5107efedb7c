"""Times of HTTP requests, for the traces of requests."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.serving.tracing.request_log import HttpCall, http_call

if TYPE_CHECKING:  # OpenTelemetry is imported only if it is used
    from banaserve.serving.tracing.otlp import OtlpTracer

_TRACE_HEADERS = ("traceparent", "tracestate")


class CallTimes:
    """Middleware that records when a request's head and body came and when its answer was sent.

    The request's task finds the times in the context variable ``http_call``.

    Args:
        tracer: Tracer that is notified when an answer has been sent; None without tracing.
    """

    def __init__(self, app: ASGIApp, tracer: OtlpTracer | None = None) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = HttpCall(time.monotonic(), time.time(), scope["method"], scope["path"])
        if self._tracer is not None:
            headers = Headers(scope=scope)
            call.headers = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
        before = http_call.set(call)
        try:
            await self._app(scope, _timed_receive(call, receive), _timed_send(call, send))
        finally:
            http_call.reset(before)
            call.answered_s = call.answered_s or time.monotonic()
            if self._tracer is not None:
                self._tracer.answered(call)


def _timed_receive(call: HttpCall, receive: Receive) -> Receive:
    async def timed() -> Message:
        message = await receive()
        if message["type"] == "http.request" and not message.get("more_body"):
            call.received_s = time.monotonic()
        return message

    return timed


def _timed_send(call: HttpCall, send: Send) -> Send:
    def timed(message: Message) -> Awaitable[None]:
        # A part of a stream costs no coroutine here.
        return send(message) if message.get("more_body") else ends(message)

    async def ends(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.start":
            call.status = message["status"]
        elif message["type"] == "http.response.body":
            call.answered_s = time.monotonic()

    return timed
