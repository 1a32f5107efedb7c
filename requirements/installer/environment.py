"""The folder ``.venv``: made, and found damaged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from installer import places, tools
from installer.commands import quietly, run
from installer.console import Problem, say


def make() -> None:
    """Create ``.venv`` with what installs and builds; anew where one is there that does not run.

    Raises:
        Problem: Something is missing on this machine, or a package could not be had.
    """
    _check_compiler()
    if places.VENV.exists() and not _runs():
        say("making .venv again: its Python does not run")
        _empty()
    else:
        say(f"creating .venv with Python {sys.version.split()[0]}")
    _create()
    places.LOG.write_text("")
    if not bring_uv():
        say("pip installs alone: it could not get uv, which is faster")
    repair()
    tools.best().install(
        "--require-hashes", "-r", places.BUILD_LOCK, what="installing the build tools"
    )


def repair() -> list[str]:
    """Forget packages whose files are not all there, so that they are installed again.

    Returns:
        Their names.
    """
    lost = [info for info in places.site_packages().glob("*.dist-info") if _is_damaged(info)]
    for info in lost:
        shutil.rmtree(info)
    return sorted(info.name.split("-")[0].replace("_", "-") for info in lost)


def _check_compiler() -> None:
    if not (shutil.which("c++") or shutil.which("g++")):
        raise Problem("found no C++ compiler: install g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise Problem(
            f"found no Python.h of {sys.executable}: install its development package (python3-dev)"
        )


def _empty() -> None:
    """Not the folder itself: it may be a link, or a volume."""
    for path in places.VENV.iterdir() if places.VENV.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _runs() -> bool:
    return quietly([places.PYTHON, "-c", "print(1)"]).strip() == "1"


def _create() -> None:
    """Without pip where another can bring it: unpacking Python's own copy takes 5 s."""
    bare = tools.find_uv() is not None or _pip_can_serve_others()
    command = [sys.executable, "-m", "venv", *(["--without-pip"] if bare else []), places.VENV]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        _empty()
        lines = (done.stdout + done.stderr).strip().splitlines()
        if "No space left" in done.stderr:
            raise OSError(28, "No space left on device")
        raise Problem(
            f"{sys.executable} cannot create environments ({lines[-1] if lines else 'no reason'}): "
            "install its venv module (python3-venv)"
        )


def _pip_can_serve_others() -> bool:
    """Whether pip of this Python installs into another's environment: from 22.3 on."""
    return "--python" in quietly([sys.executable, "-m", "pip", "--help"])


def bring_uv() -> bool:
    """Whether uv is there; installs it if not. Where it is not to be had, pip is there."""
    if tools.find_uv() is not None:
        return True
    pip = [sys.executable, "-m", "pip", "--python", str(places.PYTHON)]
    if tools.has_pip():
        pip = [str(places.PYTHON), "-m", "pip"]
    pip += ["--disable-pip-version-check", "install", "--no-compile", "--no-deps"]
    return run([*pip, "--require-hashes", "-r", places.INSTALLER_LOCK]).code == 0


def _is_damaged(info: Path) -> bool:
    """Whether a file that the package brought is missing, or empty where it should not be."""
    try:
        rows = [row.rsplit(",", 2) for row in (info / "RECORD").read_text().splitlines()]
        (info / "METADATA").stat()
        base = f"{info.parent}/"
        for name, _, size in rows:
            if name.endswith(".pyc"):  # noted or not, as the tool likes
                continue
            if not os.stat(base + name.strip('"')).st_size and size not in ("", "0"):
                return True
    except OSError:
        return True
    return False
