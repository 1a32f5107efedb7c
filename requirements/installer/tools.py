"""The two tools that install packages: uv where it is there, pip otherwise."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Protocol

from installer import diagnosis, pip_settings, places
from installer.commands import Ended, quietly, run
from installer.console import Problem, say
from installer.progress import Progress

_OLDEST_UV = (0, 5)
_PROBE_S = "10"
_PIP: tuple[str, ...] = (str(places.PYTHON), "-m", "pip", "--disable-pip-version-check")


class Tool(Protocol):
    """Installs into ``.venv`` exactly what it is told, without a resolver."""

    def install(
        self,
        *arguments: str | Path,
        what: str,
        index: str = "",
        needs_bytes: int = 0,
    ) -> None:
        """Install what ``arguments`` name, and nothing that it requires.

        Args:
            what: What fails where this fails, in the line that says so.
            index: One more place to look in: hashes say what may come from there.
            needs_bytes: On the disk, as far as known.

        Raises:
            Problem: Something could not be installed.
        """

    def offers(self, lock: Path, index: str = "") -> bool:
        """Whether the torch that ``lock`` names can be had, for this Python and machine."""


class Uv:
    """uv, told of what pip's configuration says."""

    def __init__(self, program: Path, settings: dict[str, str]) -> None:
        self._program = program
        told = pip_settings.uv_variables(settings) | _cache()
        # What a person says to uv itself comes first.
        self._variables = {name: value for name, value in told.items() if name not in os.environ}

    def install(
        self,
        *arguments: str | Path,
        what: str,
        index: str = "",
        needs_bytes: int = 0,
    ) -> None:
        progress = Progress()
        command: list[str | Path] = [*self._command(index), *arguments]
        ended = run(command, progress.read_uv, self._variables, on_terminal=True)
        progress.end()
        if ended.code:
            raise diagnosis.problem(ended, what, needs_bytes)

    def offers(self, lock: Path, index: str = "") -> bool:
        hasty = {"UV_HTTP_TIMEOUT": _PROBE_S, "UV_HTTP_RETRIES": "1"} if index else {}
        command: list[str | Path] = [
            *self._command(index),
            "--dry-run",
            "--require-hashes",
            "-r",
            lock,
        ]
        return run(command, environment={**self._variables, **hasty}).code == 0

    def compile(self, *arguments: str | Path) -> Ended:
        """Write a lock for every Python and machine that ``arguments`` allow."""
        command: list[str | Path] = [self._program, "pip", "compile", "--universal"]
        command += ["--python-version", "3.11"]
        command += ["--generate-hashes", "--no-header", "--no-annotate", "--quiet", "--no-config"]
        index = os.environ.get("TORCH_INDEX", "")
        extra = ["--index", index] if index else []
        return run([*command, *extra, *arguments], environment=self._variables)

    def _command(self, index: str) -> list[str | Path]:
        command: list[str | Path] = [self._program, "pip", "install", "--python", places.PYTHON]
        return [*command, "--no-deps", *(["--index", index] if index else [])]


class Pip:
    """pip of ``.venv``."""

    def install(
        self,
        *arguments: str | Path,
        what: str,
        index: str = "",
        needs_bytes: int = 0,
    ) -> None:
        progress = Progress()
        # What a server imports is compiled when it is imported: all 22,000 files take 80 s.
        command: list[str | Path] = [
            *_PIP,
            "install",
            "--no-compile",
            "--no-deps",
        ]
        command += [*arguments, *_extra(index)]
        bar = "raw" if _version(quietly([*_PIP, "--version"])) >= (24, 1) else "off"
        ended = run([*command, "--progress-bar", bar], progress.read_pip)
        progress.end()
        if ended.code:
            raise diagnosis.problem(ended, what, needs_bytes)

    def offers(self, lock: Path, index: str = "") -> bool:
        version = torch_version(lock)
        hasty = {"PIP_TIMEOUT": _PROBE_S, "PIP_RETRIES": "1"} if index else {}
        command = [*_PIP, "index", "versions", "torch", *_extra(index)]
        found = re.search(r"^Available versions: (.*)$", quietly(command, hasty), re.MULTILINE)
        return found is not None and version in found[1].split(", ")


def best() -> Tool:
    """uv of PATH or ``.venv`` if it can do as pip is configured, otherwise pip."""
    uv = find_uv()
    if uv is None:
        return _own_pip()
    settings = configured()
    if unknown := pip_settings.unknown_to_uv(settings):
        say(f"pip installs, not uv, which knows no {unknown[0]} of pip's configuration")
        return _own_pip()
    return Uv(uv, settings)


def _own_pip() -> Pip:
    """pip of ``.venv``, brought where ``.venv`` was made without it.

    Raises:
        Problem: This Python has no pip to bring.
    """
    if not has_pip() and run([places.PYTHON, "-m", "ensurepip"]).code:
        raise Problem("cannot bring pip into .venv: install Python's ensurepip (python3-venv)")
    return Pip()


def has_pip() -> bool:
    """Whether ``.venv`` has a pip of its own."""
    return bool(quietly([places.PYTHON, "-m", "pip", "--version"]))


def find_uv() -> Path | None:
    for found in (places.VENV / "bin" / "uv", shutil.which("uv")):
        if found and _version(quietly([found, "--version"])) >= _OLDEST_UV:
            return Path(found)
    return None


def configured() -> dict[str, str]:
    """What pip is configured to do, as the pip of ``.venv`` says, or that of the Python below."""
    for python in (places.PYTHON, Path(sys.base_prefix, "bin/python3"), Path(sys.executable)):
        if listing := quietly([python, "-m", "pip", "config", "list"]):
            return pip_settings.read(listing)
    return {}


def torch_version(lock: Path) -> str:
    found = re.search(r"^torch==([^\s;\\]+)", lock.read_text(), re.MULTILINE)
    if found is None:
        raise Problem(f"{lock} names no torch: take it from the repository again")
    return found[1]


def _extra(index: str) -> list[str]:
    return ["--extra-index-url", index] if index else []


def _version(text: str) -> tuple[int, ...]:
    found = re.search(r"\d+(?:\.\d+)+", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def _cache() -> dict[str, str]:
    """uv's cache beside ``.venv`` where its usual place is another disk: files are linked, not
    copied."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    while not usual.exists():
        usual = usual.parent
    if os.access(usual, os.W_OK) and usual.stat().st_dev == places.VENV.stat().st_dev:
        return {}
    return {"UV_CACHE_DIR": str(places.VENV / "cache")}
