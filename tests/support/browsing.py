"""A real browser without a window, and what its pages say to the console."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "ui"
AXE = ROOT / ".venv" / "axe-core" / "axe.min.js"
_TIMEOUT_MS = 60_000
REFUSED = "the server responded with a status of 401"
"""A browser itself says this on the console where a key is refused."""


def chromium() -> str:
    """The program; skips the test where there is none."""
    program = shutil.which("chromium")
    if program is None or importlib.util.find_spec("playwright") is None:
        pytest.skip("needs chromium (Debian) and playwright (PyPI): make install DEV=full")
    return program


class Browser:
    """Opens pages, each as another user would; collects what goes wrong on them."""

    def __init__(self, chrome: Any) -> None:
        self._chrome = chrome
        self.problems: list[str] = []

    @contextlib.contextmanager
    def page(self, url: str, *, width: int = 1400, dark: bool = False) -> Iterator[Any]:
        """A page on ``url``, closed at the end."""
        context = self._chrome.new_context(
            viewport={"width": width, "height": 900},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce",
        )
        context.set_default_timeout(_TIMEOUT_MS)
        page = context.new_page()
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.on("request", self._asked(url))
        try:
            page.goto(url)
            yield page
        finally:
            context.close()

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and REFUSED not in text:
            self.problems.append(text)

    def _asked(self, url: str) -> Any:
        host = url.split("/ui")[0]

        def asked(request: Any) -> None:
            if not request.url.startswith(host):
                self.problems.append(f"asks another host: {request.url}")

        return asked


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """One browser process; at its end nothing may have gone wrong on any page."""
    program = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # A sandbox needs user namespaces, which containers often do not have.
        chrome = play.chromium.launch(
            executable_path=program,
            args=["--no-sandbox", "--disable-gpu"],
            timeout=_TIMEOUT_MS,
        )
        yield Browser(chrome)
        chrome.close()


def keep(page: Any, name: str, *, whole: bool = True) -> None:
    """Save a picture of the page, or of the part that is in view, for people."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    if whole:
        page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=str(SCREENSHOTS / f"{name}.png"), full_page=whole)


def keep_for_readme(page: Any, name: str) -> None:
    """Save what is in view where ``make pictures`` asks for it, and with the other pictures."""
    keep(page, name, whole=False)
    if folder := os.environ.get("BANASERVE_PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"))


def check_accessible(page: Any) -> None:
    """Nothing that axe-core calls serious or critical; skips where axe-core is missing."""
    if not AXE.exists():
        pytest.skip("needs axe-core (npm): make install DEV=full")
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    bad = [
        f"{one['id']}: {one['help']}: {[node['html'][:200] for node in one['nodes'][:3]]}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert not bad, "\n".join(bad)
