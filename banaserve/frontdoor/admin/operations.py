"""Endpoints of operations that take a while: POST begins one, GET shows it, DELETE aborts it.

Migrations, role switches, scalings, changes of nodes and rolling restarts have these endpoints.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import UnionType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.frontdoor.admin.answers import answer, not_found, route, wait_s_of
from banaserve.serving.operation_base import Operations, OperationState

A = TypeVar("A")


def operation_routes(
    plural: str,
    noun: str,
    operations: Operations[Any],
    kind: type[A] | UnionType,
    begin: Callable[[A], Awaitable[OperationState]],
) -> list[Route]:
    """Return routes: ``GET``, ``POST /admin/PLURAL`` and ``GET``, ``DELETE /admin/PLURAL/ID``.

    ``GET /admin/PLURAL/ID?wait_s=5`` answers when the operation has ended, after five seconds at
    the latest.

    Args:
        noun: Name of one operation, for the message that there is no such one.
        kind: Type of the body of a POST.
        begin: Function that begins an operation; raises ``MigrationError`` if it refuses.
    """

    async def list_recent(_: Request) -> Response:
        return answer(operations.recent())

    async def begin_one(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=kind)
        return answer(await begin(ask), HTTPStatus.ACCEPTED)

    async def show(request: Request) -> Response:
        found = operations.get(request.path_params["id"])
        if found is None:
            return not_found(noun, request)
        wait_s = wait_s_of(request)
        if wait_s and found.is_open:
            found = await operations.wait(found.id, wait_s)
        return answer(found)

    async def abort(request: Request) -> Response:
        found = operations.get(request.path_params["id"])
        if found is None:
            return not_found(noun, request)
        return answer(operations.abort(found.id), HTTPStatus.ACCEPTED)

    return [
        route(f"/{plural}", list_recent),
        route(f"/{plural}", begin_one, method="POST"),
        route(f"/{plural}/{{id}}", show),
        route(f"/{plural}/{{id}}", abort, method="DELETE"),
    ]
