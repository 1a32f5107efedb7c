"""What tests of optional parts need: NIXL, Ray and Playwright; axe-core; packages of Debian.

Where the system's packages, or npm's, cannot be installed they are named, and their tests skip.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from installer import npm, places, tools
from installer.commands import run
from installer.console import Problem, say

_PROGRAMS = {
    "redis-server": "redis-server",
    "nginx": "nginx-light",
    "haproxy": "haproxy",
    "chromium": "chromium",
}
_AXE = npm.PackedFile(
    "axe-core@4.14.1",
    "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    "axe.min.js",
)
_SBIN = "/usr/local/sbin:/usr/sbin"
"""Not on every user's path, and Debian puts proxies there."""


def install(tool: tools.Tool) -> None:
    """Install all of it that can be.

    Raises:
        Problem: NIXL, Ray or Playwright could not be had.
    """
    say("installing NIXL, Ray and Playwright")
    # Without what NIXL requires: that is torch, in whatever build the index has. What Ray requires
    # is there: vLLM does too.
    tool.install(
        "--require-hashes", "-r", places.DEV_FULL, what="installing NIXL, Ray and Playwright"
    )
    _bring_axe()
    missing = _missing()
    # Not where systemd runs: it would start the server that comes with Redis.
    in_container = os.geteuid() == 0 and not Path("/run/systemd/system").is_dir()
    if missing and in_container and shutil.which("apt-get"):
        say(f"installing {' '.join(missing)} with apt-get")
        _apt_get("update", "-q")
        _apt_get("install", "-y", "-q", "--no-install-recommends", *missing)
        missing = _missing()
    if missing:
        say(f"tests that need them skip; to run them, as root: apt-get install {' '.join(missing)}")


def _bring_axe() -> None:
    """axe-core, which looks for what keeps people out of a page: one file into ``.venv``."""
    try:
        npm.bring(_AXE, places.VENV / "axe-core" / "axe.min.js")
    except Problem as problem:
        say(f"tests of the page's accessibility skip: {problem}")


def _missing() -> list[str]:
    missing = []
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        missing.append("libibverbs1")
    return missing + [package for program, package in _PROGRAMS.items() if not _is_there(program)]


def _is_there(program: str) -> bool:
    return bool(shutil.which(program) or shutil.which(program, path=_SBIN))


def _apt_get(*words: str) -> None:
    if run(["apt-get", *words], environment={"DEBIAN_FRONTEND": "noninteractive"}).code:
        say(f"apt-get {words[0]} failed: see {places.LOG}")
