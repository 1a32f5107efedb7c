"""Routes of the admin API with their answers and refusals, also those of lasting operations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from types import UnionType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from banaserve.base.errors import InstanceDeadError, MigrationError, UserError
from banaserve.frontdoor.edge.refusals import error_response
from banaserve.serving.operation_base import Operations, OperationState

PREFIX = "/admin"
_MAX_WAIT_S = 30.0

A = TypeVar("A")
Endpoint = Callable[..., Awaitable[Response]]
"""Function of what its route gives and of a request."""


def answer(value: object, status: int = 200) -> Response:
    """Return ``value`` as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def route(path: str, endpoint: Endpoint, *given: object, method: str = "GET") -> Route:
    """Return the route of ``endpoint`` below ``/admin``; ``given`` are its first arguments.

    Errors that the endpoint raises become a status and one line.
    """

    async def answered(request: Request) -> Response:
        try:
            return await endpoint(*given, request)
        except MigrationError as refused:
            return error_response(HTTPStatus.CONFLICT, str(refused))
        except InstanceDeadError as gone:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(gone))
        except (UserError, msgspec.DecodeError) as wrong:
            return error_response(HTTPStatus.BAD_REQUEST, str(wrong))

    return Route(PREFIX + path, answered, methods=[method])


def value_route(path: str, read: Callable[[], object]) -> Route:
    """Return the route of a GET that answers what ``read`` returns."""

    async def show(_: Request) -> Response:
        return answer(read())

    return route(path, show)


def ask_route(
    path: str,
    kind: type[A] | UnionType,
    act: Callable[[A], Awaitable[object]],
    status: int = HTTPStatus.OK,
) -> Route:
    """Return the route of a POST whose body is of ``kind``; ``act`` returns the answer."""

    async def asked(request: Request) -> Response:
        return answer(await act(msgspec.json.decode(await request.body(), type=kind)), status)

    return route(path, asked, method="POST")


def not_found(what: str, request: Request) -> Response:
    """Return a 404 for the ``{id}`` of the path."""
    wanted = request.path_params["id"]
    return error_response(HTTPStatus.NOT_FOUND, f"there is no {what} {wanted}")


def wait_s_of(request: Request) -> float:
    """Return ``?wait_s=`` in seconds; 0 without it.

    Raises:
        UserError: The value is no number of seconds, or too large.
    """
    given = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(given)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _MAX_WAIT_S:
        raise UserError(f"wait_s={given}: seconds from 0 to {_MAX_WAIT_S:g}")
    return wait_s


def last_of(request: Request) -> int | None:
    """Return ``?last=``; None without it.

    Raises:
        UserError: The value is no whole number.
    """
    given = request.query_params.get("last")
    if given is None:
        return None
    # int() also accepts digits of other scripts, and refuses a text of thousands of digits.
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise UserError(f"last={given[:20]}: give a whole number")
    return int(given)


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
        value_route(f"/{plural}", operations.recent),
        ask_route(f"/{plural}", kind, begin, HTTPStatus.ACCEPTED),
        route(f"/{plural}/{{id}}", show),
        route(f"/{plural}/{{id}}", abort, method="DELETE"),
    ]
