"""Endpoints that accept an already parsed body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute, request_response
from starlette.requests import Request
from starlette.responses import Response

from banaserve.frontdoor.bodies.guard import PARSED


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
