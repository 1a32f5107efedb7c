"""Files of a balancer's page: two of its own, and those that it shares with a server's page."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from banaserve.frontdoor.page.files import SECURITY_HEADERS, PageFile, page_files

STATUS_PATH = b"/admin/status"
"""Path of the balancer's status, for which the admin key is needed; no file needs a key."""

_STATIC = Path(__file__).parent / "static"
_SHARED = ("charts.js", "elements.js", "icon.svg", "style.css", "vendor/uPlot.css",
           "vendor/uPlot.js", "vendor/uPlot.LICENSE")  # fmt: skip

NO_STORE = b"Cache-Control: no-store\r\n"
PAGE_FIELDS = b"Cache-Control: no-cache\r\n" + b"".join(
    b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()
)
"""Header lines of each file."""


@cache
def balancer_files() -> Mapping[bytes, PageFile]:
    """Return the files by their paths."""
    shared = {name: page_files()[name] for name in _SHARED}
    files = {f"/ui/{name}".encode(): one for name, one in (shared | page_files(_STATIC)).items()}
    return files | {b"/ui/": files[b"/ui/index.html"]}
