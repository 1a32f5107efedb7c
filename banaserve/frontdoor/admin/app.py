"""The admin API: what moves between instances and who decides it, behind a key of its own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.errors import UserError
from banaserve.contracts.migration_api import (
    ExpertLoadRequest,
    MigrationRequest,
    OverlapRequest,
    ShareRequest,
)
from banaserve.frontdoor.admin.answers import (
    PREFIX,
    answer,
    ask_route,
    last_of,
    not_found,
    operation_routes,
    route,
)
from banaserve.frontdoor.admin.control import Control, control_routes
from banaserve.frontdoor.admin.live import LivePage, live_routes
from banaserve.frontdoor.edge.edge import mark_authenticated, path_of
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.frontdoor.middleware.admission import BodyLimit
from banaserve.frontdoor.middleware.api_keys import given_key
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.placement import placement_of, share
from banaserve.serving.tracing.request_log import RequestLog
from banaserve.serving.tracing.trace_collection import TraceCollector

_MAX_BODY_BYTES = 1 << 20


class AdminMiddleware:
    """Middleware that answers paths below ``/admin`` and passes on all other requests.

    The users' API keys are not valid for the admin API, nor the admin key for the users' API. A
    page's token is valid wherever the admin key is, but creates no further tokens.
    """

    def __init__(
        self,
        app: ASGIApp,
        coordinator: Coordinator,
        key: str,
        control: Control | None = None,
        traces: Traces | None = None,
        page: LivePage | None = None,
    ) -> None:
        self._app = app
        self._admin = BodyLimit(admin_app(coordinator, control, traces, page), _MAX_BODY_BYTES)
        self._key = key.encode()
        self._pages = page.access if page is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{path_of(scope)}/".startswith(f"{PREFIX}/"):
            await self._app(scope, receive, send)
            return
        given = given_key(Headers(scope=scope))
        is_key = bool(given) and secrets.compare_digest(given.encode(), self._key)
        if self._pages is not None:
            about_pages = self._pages.answer(scope["method"], path_of(scope), given, is_key=is_key)
            if about_pages is not None:
                mark_authenticated(scope)
                await about_pages(scope, receive, send)
                return
        if not (is_key or (self._pages is not None and self._pages.opens(given))):
            refusal = refuse(
                "admin_key",
                HTTPStatus.UNAUTHORIZED,
                "no valid admin key: send the header 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        mark_authenticated(scope)
        await self._admin(scope, receive, send)


def admin_app(
    coordinator: Coordinator,
    control: Control | None = None,
    traces: Traces | None = None,
    page: LivePage | None = None,
) -> ASGIApp:
    """Return the endpoints without the key check, those of the optional parts where given."""
    routes = [
        route("/placement", _placement, coordinator, control),
        *operation_routes(
            "migrations", "migration", coordinator, MigrationRequest, coordinator.begin
        ),
        ask_route("/overlap", OverlapRequest, coordinator.overlap),
        ask_route("/share", ShareRequest, partial(share, coordinator)),
        ask_route("/expert-load", ExpertLoadRequest, coordinator.expert_load),
    ]
    if control is not None:
        routes += control_routes(control, coordinator)
    if traces is not None:
        # A client may choose the id, which may contain slashes.
        routes += [route("/traces", _list, traces), route("/traces/{id:path}", _show, traces)]
    if page is not None:
        routes += live_routes(page)
    else:
        routes.append(route("/page-code", _no_page, method="POST"))
    return Starlette(routes=routes)


async def _placement(coordinator: Coordinator, control: Control | None, _: Request) -> Response:
    found = await placement_of(coordinator)
    if control is not None:
        found = msgspec.structs.replace(found, nodes=control.nodes.nodes())
    return answer(found)


async def _no_page(_: Request) -> Response:
    raise UserError("this server has no page: it was started with --no-ui")


@dataclass(frozen=True, slots=True)
class Traces:
    """The front door's notes of requests, and the collector of the engines' notes."""

    requests: RequestLog
    collector: TraceCollector


async def _list(traces: Traces, request: Request) -> Response:
    """Return the last requests, the oldest first; ``?last=20``: only the last 20."""
    return answer(traces.requests.last(last_of(request)))


async def _show(traces: Traces, request: Request) -> Response:
    notes = traces.requests.find(request.path_params["id"])
    if notes is None:
        return not_found("request", request)
    return answer(await traces.collector.trace_of(notes))
