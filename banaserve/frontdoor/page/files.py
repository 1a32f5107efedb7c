"""Files of a page, served from memory, and the headers that keep a browser within them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
def page_files(folder: Path = STATIC) -> dict[str, PageFile]:
    """Return all files of a page by their paths below ``folder``, by default the server's page."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
            found[path.relative_to(folder).as_posix()] = PageFile(body, _TYPES[path.suffix], etag)
    return found
