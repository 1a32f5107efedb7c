"""Files of the page under ``/ui``: served from memory, without a key, as they hold no secret."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.frontdoor.page.records import PageInfo

PREFIX = "/ui"
STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
SECURITY_HEADERS = {
    # Forbids inline scripts and styles, other hosts, frames, and forms sent by the browser.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page."""

    body: bytes
    media_type: str
    etag: str


@cache
def page_files() -> dict[str, PageFile]:
    """Return all files by their paths below ``/ui/``."""
    found = {}
    for path in sorted(STATIC.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.relative_to(STATIC).as_posix()] = PageFile(body, _TYPES[path.suffix], etag)
    return found


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
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
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
