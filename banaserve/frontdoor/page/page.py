"""Middleware for the page under ``/ui``, whose files need no key, as they hold no secret."""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.frontdoor.edge.edge import path_of
from banaserve.frontdoor.page.files import SECURITY_HEADERS, page_files
from banaserve.frontdoor.page.records import PageInfo

PREFIX = "/ui"


def json_response(body: bytes) -> Response:
    """Return JSON that no cache keeps."""
    headers = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
    return Response(body, 200, headers, "application/json")


class PageMiddleware:
    """Middleware that answers ``/ui``, redirects ``/`` to it, and passes on all other requests."""

    def __init__(self, app: ASGIApp, info: PageInfo) -> None:
        self._app = app
        self._info = msgspec.json.encode(info)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        is_page = path in ("/", PREFIX) or path.startswith(f"{PREFIX}/")
        if scope["type"] != "http" or not is_page:
            await self._app(scope, receive, send)
            return
        below = path.removeprefix(PREFIX) if path != "/" else ""
        await self._answer(below, scope)(scope, receive, send)

    def _answer(self, path: str, scope: Scope) -> Response:
        if scope["method"] not in ("GET", "HEAD"):
            return Response(status_code=405, headers={**SECURITY_HEADERS, "Allow": "GET, HEAD"})
        if not path:
            # Relative: a proxy may have added a prefix to the path.
            return RedirectResponse(f"{PREFIX.removeprefix('/')}/", 307, SECURITY_HEADERS)
        name = path.removeprefix("/") or "index.html"
        if name == "page.json":
            return json_response(self._info)
        file = page_files().get(name)
        if file is None:
            return Response("there is no such file\n", 404, SECURITY_HEADERS, "text/plain")
        headers = {**SECURITY_HEADERS, "Cache-Control": "no-cache", "ETag": file.etag}
        if Headers(scope=scope).get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, 200, headers, file.media_type)
