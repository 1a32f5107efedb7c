"""The layout that ARCHITECTURE.md describes, where no other tool checks it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from docs.repository.findings import PACKAGE, PACKAGES, ROOT, Finding, at, sources, tree_of

FOLDERS = ("kernels", "kvstore", "orchestrator")
"""Folders at the top that only say where the code of that name is."""
SETTINGS_FILE = ROOT / "pyproject.toml"
SETTINGS: dict[str, Any] = tomllib.loads(SETTINGS_FILE.read_text())["tool"]["importlinter"]
WITH_VLLM = {"cli", "engine", "frontdoor", "mains", "migration", "pacing", "serving"}
"""Packages that may depend on vLLM."""
_ENTRY = re.compile(r"\bEntr(y|ies)\b|Begin at")


def findings() -> Iterator[Finding]:
    """Yield folders and packages that are not as they must be."""
    yield from _top()
    yield from _packages()
    yield from _contracts()


def _top() -> Iterator[Finding]:
    for name in FOLDERS:
        held = sorted(path.name for path in (ROOT / name).glob("*"))
        if held != ["README.md"]:
            yield Finding(ROOT / name, 1, f"holds {held}, not only README.md")


def _packages() -> Iterator[Finding]:
    # A regular package of one of these names would shadow an installed one.
    for path in [*(ROOT / "tests").rglob("__init__.py"), ROOT / "conftest.py"]:
        if path.exists():
            yield Finding(path, 1, "tests are no packages, and the top is not on their path")
    for folder in sorted({path.parent for path in sources(*PACKAGES)}):
        if not (folder / "__init__.py").exists():
            yield Finding(folder, 1, "has no __init__.py that says what it holds and where it runs")
    for path in sources(*PACKAGES):
        is_inner = path.name == "__init__.py" and path.parent != PACKAGE
        if is_inner and not _ENTRY.search(ast.get_docstring(tree_of(path)) or ""):
            yield Finding(path, 1, "says neither `Entry:` nor `Begin at`: where does one begin?")


def _contracts() -> Iterator[Finding]:
    contract = next(one for one in SETTINGS["contracts"] if "depend on vllm" in one["name"])
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - WITH_VLLM
    for name in sorted({f"banaserve.{one}" for one in packages} - set(contract["source_modules"])):
        yield at(SETTINGS_FILE, contract["name"], f"{name} is missing in this contract")
