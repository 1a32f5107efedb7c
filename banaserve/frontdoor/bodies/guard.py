"""Guard of requests' bodies: bounds bodies, and parses long ones off the event loop.

Endpoints use the body that has been parsed (``take_parsed_bodies``).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from time import monotonic
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute, request_response
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from banaserve.base.text.json_text import as_utf8
from banaserve.frontdoor.bodies.bounds import (
    NO_STRICT_JSON,
    BodyRefusedError,
    Outline,
    RequestBounds,
    measure,
    read_outline,
    validation_s,
)
from banaserve.frontdoor.bodies.grammar_checker import GrammarChecker, GrammarSpec, grammars_of
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.frontdoor.middleware.admission import RETRY_AFTER_S

LONG_BYTES = 256 * 2**10
"""Size from which a body is checked in a thread."""
PARSED = "banaserve.body"
"""Key of the parsed body in a request's scope."""
_NUM_THREADS = 2
_MAX_HELD_OBJECT_BYTES = 2**30
_NOT_JSON = ("application/x-www-form-urlencoded", "application/octet-stream")


class BodyGuard:
    """Middleware that refuses bodies of too many objects and grammars too costly to compile.

    The endpoint gets the body in one message, and a long body already parsed.

    Args:
        grammars: Checker of grammars; None if no endpoint takes grammars.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: RequestBounds,
        grammars: GrammarChecker | None,
        max_held_object_bytes: int = _MAX_HELD_OBJECT_BYTES,
        pace: ValidationPace | None = None,
    ) -> None:
        self._app, self._bounds = app, bounds
        self._grammars = grammars
        self._pace = pace or ValidationPace()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "body")
        self._max_held_object_bytes = max_held_object_bytes
        self._held_object_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        if _is_upload(scope):
            await self._app(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return
        body = await self._in_utf8(body)
        held = _Held()
        try:
            refusal = await self._refusal(scope, body, held)
            if refusal is not None:
                await refusal(scope, receive, send)
            else:
                await self._app(scope, _replayed(body, receive), send)
        finally:
            self._held_object_bytes -= held.object_bytes

    async def _in_utf8(self, body: bytes) -> bytes:
        if len(body) < LONG_BYTES:
            return as_utf8(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, as_utf8, body)

    async def _refusal(self, scope: Scope, body: bytes, held: _Held) -> Response | None:
        """Return the answer to ``body`` if it is refused, else None."""
        try:
            specs, cost_s = await self._look(scope, body, held)
            await self._pace.wait(cost_s)
            if specs and self._grammars is not None:
                await self._grammars.check(specs)
        except BodyRefusedError as refusal:
            status = refusal.status
            is_busy = status == HTTPStatus.SERVICE_UNAVAILABLE
            headers = {"Retry-After": str(RETRY_AFTER_S)} if is_busy else None
            return refuse(refusal.cause, HTTPStatus(status), str(refusal), headers)
        return None

    async def _look(
        self, scope: Scope, body: bytes, held: _Held
    ) -> tuple[list[GrammarSpec], float]:
        """Return the grammars of ``body`` and the estimated time of its validation, in seconds.

        For a long body, adds the memory of its parsed objects to ``held``.
        """
        if len(body) < LONG_BYTES:
            outline = read_outline(body, self._bounds) if body.strip() else None
            return _found(outline, 0)
        loop = asyncio.get_running_loop()
        shape = await loop.run_in_executor(self._threads, measure, body)
        object_bytes = shape.object_bytes
        if self._held_object_bytes + object_bytes > self._max_held_object_bytes:
            raise BodyRefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "held_objects",
                "requests under way hold too many objects; try again shortly",
            )
        self._held_object_bytes += object_bytes
        held.object_bytes = object_bytes
        found, parsed = await loop.run_in_executor(
            self._threads, _parse, body, self._bounds, shape.values
        )
        if parsed is not None:
            scope[PARSED] = parsed
        return found


def _is_upload(scope: Scope) -> bool:
    """Return whether no endpoint reads the body as JSON: ``application/octet-stream+json`` is.

    Only endpoints of audio take uploads; some others read JSON whatever its type is said to be.
    """
    if "/audio/" not in scope["path"]:
        return False
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    return kind in _NOT_JSON or kind.startswith("multipart/")


class _Held:
    """Memory of parsed objects that one request is counted with."""

    object_bytes = 0


def _found(outline: Outline | None, num_values: int) -> tuple[list[GrammarSpec], float]:
    if outline is None:
        return [], 0.0
    return grammars_of(outline), validation_s(outline, num_values)


def _parse(
    body: bytes, bounds: RequestBounds, num_values: int
) -> tuple[tuple[list[GrammarSpec], float], Any]:
    """Return what ``_found`` finds in a long body, and its objects; None if it is no JSON."""
    found = _found(read_outline(body, bounds), num_values)
    with contextlib.suppress(*NO_STRICT_JSON):
        return found, msgspec.json.decode(body)
    with contextlib.suppress(ValueError, RecursionError):
        return found, json.loads(body)
    return found, None


async def _whole(receive: Receive) -> bytes | None:
    """Return the body; None if the client disconnected before the body's end."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a receiver that yields ``body`` in one message, then the messages of ``receive``."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


class ParsedRequest(Request):
    """A request that returns its body's JSON as the guard has parsed it, if it has."""

    async def json(self) -> Any:
        if PARSED in self.scope:
            return self.scope[PARSED]
        return await super().json()


def take_parsed_bodies(app: FastAPI) -> None:
    """Let the endpoints of ``app`` use the body that ``BodyGuard`` has parsed."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.body_field is not None:
            route.app = request_response(_from_parsed(route.get_route_handler()))


def _from_parsed(
    handle: Callable[[Request], Coroutine[Any, Any, Response]],
) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def handle_parsed(request: Request) -> Response:
        return await handle(ParsedRequest(request.scope, request.receive))

    return handle_parsed


LEAST_S = 0.05
"""Validation time below which nothing is delayed, in seconds: streams are sent in steps of about
this length."""
FRACTION = 0.2
MAX_WAIT_S = 10.0


class ValidationPace:
    """Pacer of slow validations: all together take at most ``FRACTION`` of the event loop's time.

    vLLM validates a request on the event loop and holds Python's lock, so that a thread would not
    help other requests' streams.

    Args:
        clock: Returns monotonic seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._free_s = 0.0

    async def wait(self, cost_s: float) -> None:
        """Wait until a validation that takes ``cost_s`` seconds may begin.

        Raises:
            BodyRefusedError: The validation would have to wait for others for too long.
        """
        if cost_s < LEAST_S:
            return
        now_s = self._clock()
        begins_s = max(now_s, self._free_s)
        if begins_s - now_s > MAX_WAIT_S:
            raise BodyRefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "validation",
                "too many requests with very many parts or token ids wait; try again shortly",
            )
        self._free_s = begins_s + cost_s / FRACTION
        if begins_s > now_s:
            await self._sleep(begins_s - now_s)
