"""Builds of this checkout's own packages, while others are downloaded."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

from installer import diagnosis, places
from installer.commands import Ended
from installer.console import say

_BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


class Build:
    """Wheels of what is installed in place, and of the stand-ins, each built by a process."""

    def __init__(self) -> None:
        self._folder = places.VENV / "wheels"
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        say("building banaserve's native part beside it")
        self._processes = [self._start(one, "build_editable") for one in places.DISTRIBUTIONS]
        self._processes += [self._start(one, "build_wheel") for one in _missing_stand_ins()]

    def wheels(self) -> list[Path]:
        """Wait for all; returns what was built.

        Raises:
            Problem: One could not be built.
        """
        for source, process in self._processes:
            output, _ = process.communicate()
            with places.LOG.open("a") as log:
                log.write(f"$ build {source}\n{output}\n")
            if process.returncode:
                raise diagnosis.problem(
                    Ended(process.returncode, output), f"building {source.name}"
                )
        return sorted(self._folder.glob("*.whl"))

    def stop(self) -> None:
        for _, process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, source: Path, hook: str) -> tuple[Path, subprocess.Popen[str]]:
        process = subprocess.Popen(
            [str(places.PYTHON), "-c", _BUILD, hook, str(self._folder)],
            cwd=source,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
        return source, process


def _missing_stand_ins() -> list[Path]:
    folders = sorted((places.REQUIREMENTS / "standins").iterdir())
    return [folder for folder in folders if not _is_installed(folder)]


def _is_installed(folder: Path) -> bool:
    version = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    try:
        return importlib.metadata.version(folder.name) == version
    except importlib.metadata.PackageNotFoundError:
        return False
