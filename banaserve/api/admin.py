"""The admin API: moves layers and heads between instances, behind a key of its own."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.api.errors import error_response
from banaserve.api.limits import BodyLimit
from banaserve.engine.vllm.moves.coordinator import Coordinator
from banaserve.engine.vllm.moves.placements import placement_of
from banaserve.engine.vllm.moves.words import Ask, Migration
from banaserve.errors import InstanceDeadError, MigrationError, UserError

PREFIX = "/admin"
_MAX_BODY_BYTES = 1 << 20
_MAX_WAIT_S = 30.0

Endpoint = Callable[[Request], Awaitable[Response]]


class AdminDoor:
    """Answers what lies under ``/admin`` and passes on the rest.

    The users' API keys open nothing here, and this key opens nothing there.
    """

    def __init__(self, app: ASGIApp, coordinator: Coordinator, key: str) -> None:
        self._app = app
        self._admin = BodyLimit(admin_app(coordinator), _MAX_BODY_BYTES)
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_admin(scope):
            await self._app(scope, receive, send)
            return
        if not self._opens(Headers(scope=scope).get("authorization", "")):
            refusal = error_response(
                HTTPStatus.UNAUTHORIZED,
                "no valid admin key: send the header 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._admin(scope, receive, send)

    def _opens(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        is_right = secrets.compare_digest(key.encode(), self._key)
        return is_right and scheme.lower() == "bearer"


def admin_app(coordinator: Coordinator) -> ASGIApp:
    """The endpoints without the key."""
    routes = [
        Route(f"{PREFIX}/placement", _placement(coordinator)),
        Route(f"{PREFIX}/migrations", _list(coordinator), methods=["GET"]),
        Route(f"{PREFIX}/migrations", _begin(coordinator), methods=["POST"]),
        Route(f"{PREFIX}/migrations/{{id}}", _show(coordinator), methods=["GET"]),
        Route(f"{PREFIX}/migrations/{{id}}", _abort(coordinator), methods=["DELETE"]),
    ]
    return Starlette(routes=routes)


def _answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refusing(endpoint: Endpoint) -> Endpoint:
    """Turn what is refused into a status and one line."""

    @functools.wraps(endpoint)
    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except MigrationError as refused:
            return error_response(HTTPStatus.CONFLICT, str(refused))
        except InstanceDeadError as gone:
            return error_response(HTTPStatus.SERVICE_UNAVAILABLE, str(gone))
        except (UserError, msgspec.DecodeError) as wrong:
            return error_response(HTTPStatus.BAD_REQUEST, str(wrong))

    return answer


def _placement(coordinator: Coordinator) -> Endpoint:
    @_refusing
    async def placement(_: Request) -> Response:
        return _answer(await placement_of(coordinator))

    return placement


def _list(coordinator: Coordinator) -> Endpoint:
    @_refusing
    async def migrations(_: Request) -> Response:
        return _answer(coordinator.recent())

    return migrations


def _begin(coordinator: Coordinator) -> Endpoint:
    @_refusing
    async def begin(request: Request) -> Response:
        ask = msgspec.json.decode(await request.body(), type=Ask)
        return _answer(await coordinator.begin(ask), HTTPStatus.ACCEPTED)

    return begin


def _show(coordinator: Coordinator) -> Endpoint:
    """``?wait_s=5`` answers when the migration has ended, after five seconds at the latest."""

    @_refusing
    async def show(request: Request) -> Response:
        migration = _known(coordinator, request)
        if migration is None:
            return _not_found(request)
        wait_s = _wait_s(request)
        if wait_s and migration.is_open:
            await coordinator.wait(migration.id, wait_s)
        return _answer(migration)

    return show


def _abort(coordinator: Coordinator) -> Endpoint:
    @_refusing
    async def abort(request: Request) -> Response:
        migration = _known(coordinator, request)
        if migration is None:
            return _not_found(request)
        return _answer(coordinator.abort(migration.id), HTTPStatus.ACCEPTED)

    return abort


def _known(coordinator: Coordinator, request: Request) -> Migration | None:
    return coordinator.get(request.path_params["id"])


def _not_found(request: Request) -> Response:
    wanted = request.path_params["id"]
    return error_response(HTTPStatus.NOT_FOUND, f"there is no migration {wanted}")


def _wait_s(request: Request) -> float:
    given = request.query_params.get("wait_s", "0")
    try:
        wait_s = float(given)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s <= _MAX_WAIT_S:
        raise UserError(f"wait_s={given}: seconds from 0 to {_MAX_WAIT_S:g}")
    return wait_s


def _is_admin(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == PREFIX or path.startswith(f"{PREFIX}/")
