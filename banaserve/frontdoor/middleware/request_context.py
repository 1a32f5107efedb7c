"""Context of a request: its times, for traces, and what its headers ask for."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from http import HTTPStatus
from math import inf, isfinite
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.base.errors import UserError
from banaserve.base.types import RequestLimits
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.kvstore.wire import MAX_KEEP_S
from banaserve.serving.client import request_keep_s, request_limits
from banaserve.serving.tracing.request_log import HttpCall, http_call

if TYPE_CHECKING:
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


TTFT_HEADER = "X-Banaserve-SLO-TTFT"
TPOT_HEADER = "X-Banaserve-SLO-TPOT"
KEEP_HEADER = "X-Banaserve-Keep"
_NAMES = frozenset(name.lower().encode() for name in (TTFT_HEADER, TPOT_HEADER, KEEP_HEADER))


class RequestHeaderReader:
    """Middleware that reads limits of a request, and how long to keep its KV; 400 to wrong values.

    Args:
        dilation: Wall seconds of the server for one second in a request's headers.
    """

    def __init__(self, app: ASGIApp, dilation: float = 1.0) -> None:
        self._app = app
        self._dilation = dilation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not any(name in _NAMES for name, _ in scope["headers"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            limits = limits_of(headers, self._dilation)
            keep_s = self._dilation * (_seconds(headers, KEEP_HEADER, MAX_KEEP_S) or 0.0)
        except UserError as wrong:
            await refuse("header", HTTPStatus.BAD_REQUEST, str(wrong))(scope, receive, send)
            return
        limits_before = request_limits.set(limits)
        keep_before = request_keep_s.set(min(keep_s, MAX_KEEP_S))
        try:
            await self._app(scope, receive, send)
        finally:
            request_limits.reset(limits_before)
            request_keep_s.reset(keep_before)


def limits_of(headers: Headers, dilation: float = 1.0) -> RequestLimits:
    """Return the limits in ``headers``, in the server's seconds; 0: the request has no limit.

    Raises:
        UserError: A value is no number of seconds.
    """
    found = (_seconds(headers, name) for name in (TTFT_HEADER, TPOT_HEADER))
    return RequestLimits(*(None if one is None else one * dilation for one in found))


def _seconds(headers: Headers, name: str, most: float = inf) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or not 0 <= seconds <= most:
        wanted = "0 or more" if most == inf else f"0 to {most:g}"
        raise UserError(f"{name} is {text[:40]!r}: give seconds, {wanted}")
    return seconds
