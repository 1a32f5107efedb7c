"""Versions of distributions and of torch's locks, and the list of examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from banaserve import __version__
from docs.repository.findings import PACKAGES, ROOT, Finding, at

EXAMPLES = ROOT / "examples"
_TORCH = re.compile(r"^torch==([\d.]+)", re.MULTILINE)


def findings() -> Iterator[Finding]:
    """Yield distributions of other versions, and examples that their list does not name."""
    yield from _examples()
    yield from _torch()
    for package in PACKAGES[1:]:
        yield from distribution_findings((ROOT / package).parent / "pyproject.toml")


def distribution_findings(file: Path) -> Iterator[Finding]:
    """Yield where a distribution beside the core is not of the core's version, or needs another."""
    project = tomllib.loads(file.read_text())["project"]
    if project["version"] != __version__:
        yield at(file, "version", f"the core is {__version__}")
    if f"banaserve=={__version__}" not in project["dependencies"]:
        yield at(file, "banaserve==", f"does not need banaserve=={__version__}")


def _torch() -> Iterator[Finding]:
    cpu, pypi = (ROOT / "requirements" / f"torch-{index}.lock" for index in ("cpu", "pypi"))
    if _TORCH.findall(cpu.read_text()) != _TORCH.findall(pypi.read_text()):
        yield at(cpu, "torch==", f"is another version than in {pypi.name}")


def _examples() -> Iterator[Finding]:
    index = EXAMPLES / "README.md"
    for path in sorted(EXAMPLES.iterdir()):
        is_shown = not path.name.startswith(("_", ".")) and path != index
        if is_shown and f"]({path.name}" not in index.read_text():
            yield Finding(index, 1, f"does not name {path.name}")
