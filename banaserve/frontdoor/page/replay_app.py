"""Page of a decision log: an application for browsers on this machine only."""

from __future__ import annotations

from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from banaserve.base.records import unpacked
from banaserve.frontdoor.page.page import SECURITY_HEADERS, PageMiddleware
from banaserve.frontdoor.page.records import PageInfo
from banaserve.frontdoor.page.replay import Replay, read_decisions

_HOSTS = ["127.0.0.1", "localhost", "[::1]"]
"""Accepted host names: a site whose name resolves to this machine must not read the log."""


def read_replay(path: Path) -> Replay:
    """Return the moments of a decision log, which may be compressed with zstd.

    Raises:
        UserError: The file cannot be read, or is no decision log.
    """
    lines = unpacked(path).split(b"\n")
    # A last line without a line end is still being written, or its writer was killed.
    return Replay(read_decisions(lines[:-1] if len(lines) > 1 else lines, str(path)))


def replay_app(replay: Replay, title: str) -> ASGIApp:
    """Return an application with the page, and the moments of ``replay`` under ``/replay``."""
    index = msgspec.json.encode(replay.index())

    async def answer_index(_: Request) -> Response:
        return _json(index)

    async def answer_moment(request: Request) -> Response:
        given = request.query_params.get("frame", "")
        is_number = given.isascii() and given.isdigit() and len(given) < 10
        if not is_number or int(given) >= replay.num_frames:
            return Response("there is no such moment\n", 404, SECURITY_HEADERS, "text/plain")
        return _json(msgspec.json.encode(replay.moment(int(given))))

    routes = [
        Route("/replay/index.json", answer_index),
        Route("/replay/moment.json", answer_moment),
    ]
    page = PageMiddleware(Starlette(routes=routes), PageInfo("replay", title, replay.time))
    return TrustedHostMiddleware(page, _HOSTS)


def _json(body: bytes) -> Response:
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
    return Response(body, 200, headers, "application/json")
