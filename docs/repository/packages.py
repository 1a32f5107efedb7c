"""Locks, versions of distributions and the packages of the examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from banaserve import __version__
from docs.repository.findings import PACKAGES, ROOT, Finding, at

FOLDER = ROOT / "requirements"
EXAMPLES = ROOT / "examples"
_DISJOINT = (
    ("serving", "cpu"),
    ("serving", "cuda"),
    ("serving", "dev"),
    ("cpu", "dev"),
    ("cuda", "dev"),
)
_NUM_HASHES = 6
"""Hashes of torch's files: one for each of three Pythons on two kinds of machine."""


def findings() -> Iterator[Finding]:
    """Yield packages in two locks, and what examples do not name."""
    yield from _locks()
    yield from _examples()
    for package in PACKAGES[1:]:
        yield from distribution_findings((ROOT / package).parent / "pyproject.toml")


def blocks(text: str) -> dict[str, str]:
    """Return the lines of each package of a lock, by its name."""
    parts = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)
    return {part.partition("==")[0].strip(): part for part in parts if "==" in part}


def _locks() -> Iterator[Finding]:
    locks = {path.stem: blocks(path.read_text()) for path in FOLDER.glob("*.lock")}
    for served, other in _DISJOINT:
        for name in sorted(locks[served].keys() & locks[other].keys()):
            yield at(FOLDER / f"{other}.lock", f"{name}==", f"{name} is in {served}.lock too")
    if "torch" in locks["cpu"]:
        yield at(FOLDER / "cpu.lock", "torch==", "torch has locks of its own")
    for name in sorted({"vllm", "torch", "triton"} - locks["cuda"].keys()):
        yield Finding(FOLDER / "cuda.lock", 1, f"{name} is missing")
    cpu, pypi = locks["torch-cpu"]["torch"], locks["torch-pypi"]["torch"]
    if cpu.split()[0] != pypi.split()[0] + "+cpu":
        yield at(FOLDER / "torch-cpu.lock", "torch==", "is another version than in torch-pypi.lock")
    if cpu.count("--hash=") < _NUM_HASHES:
        yield at(FOLDER / "torch-cpu.lock", "torch==", f"has fewer than {_NUM_HASHES} hashes")


def distribution_findings(file: Path) -> Iterator[Finding]:
    """Yield where a distribution beside the core is not of the core's version, or needs another."""
    project = tomllib.loads(file.read_text())["project"]
    if project["version"] != __version__:
        yield at(file, "version", f"the core is {__version__}")
    if f"banaserve=={__version__}" not in project["dependencies"]:
        yield at(file, "banaserve==", f"does not need banaserve=={__version__}")


def _examples() -> Iterator[Finding]:
    index = EXAMPLES / "README.md"
    for path in sorted(EXAMPLES.iterdir()):
        is_shown = not path.name.startswith(("_", ".")) and path != index
        if is_shown and f"]({path.name}" not in index.read_text():
            yield Finding(index, 1, f"does not name {path.name}")
        if (path / "pyproject.toml").is_file():
            yield from _example_package(path)


def _example_package(folder: Path) -> Iterator[Finding]:
    file = folder / "pyproject.toml"
    project = tomllib.loads(file.read_text())
    modules = sorted(project["tool"]["setuptools"]["py-modules"])
    if sorted(path.stem for path in folder.glob("*.py")) != modules:
        yield at(file, "py-modules", "does not name the modules that the folder has")
    (group,) = project["project"]["entry-points"].values()
    if [value.partition(":")[0] for value in group.values()] != modules:
        yield at(file, "entry-points", "does not name those modules")
