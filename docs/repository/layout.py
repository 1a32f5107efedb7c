"""The layout that ARCHITECTURE.md describes, where no other tool checks it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from typing import Any

from docs.repository.findings import PACKAGE, ROOT, Finding, at, sources, too_few
from docs.repository.import_graph import circles, entries_of, find_modules, read_imports

LINKS = ("kernels", "kvstore", "orchestrator")
SETTINGS_FILE = ROOT / "pyproject.toml"
SETTINGS: dict[str, Any] = tomllib.loads(SETTINGS_FILE.read_text())["tool"]["importlinter"]
WITH_VLLM = {"__main__", "api", "cli", "engine"}
"""Entries of the package that may depend on vLLM."""
APART = {"banaserve.engine.vllm.migration.controller"}
"""Folders that count as entries of the folder above their own: the controller runs in the server's
process and starts guests through the launcher, the rest of migration in engines."""


def findings() -> Iterator[Finding]:
    """Yield links and packages that are not as they must be, and circles of imports."""
    yield from _links()
    yield from _packages()
    yield from _contracts()
    yield from _circles()


def _links() -> Iterator[Finding]:
    for name in LINKS:
        link = ROOT / name
        if not link.is_symlink() or os.readlink(link) != f"banaserve/{name}" or not link.is_dir():
            yield Finding(link, 1, f"is not a link to banaserve/{name}")
        if (PACKAGE / name / "__init__.py").exists():
            yield Finding(PACKAGE / name / "__init__.py", 1, f"makes {name} a regular package")


def _packages() -> Iterator[Finding]:
    # A regular package of one of these names would shadow an installed one.
    for path in [*(ROOT / "tests").rglob("__init__.py"), ROOT / "conftest.py"]:
        if path.exists():
            yield Finding(path, 1, "tests are no packages, and the top is not on their path")
    if (ROOT / "benchmarks" / "kernels").exists():
        yield Finding(ROOT / "benchmarks" / "kernels", 1, "shadows the package kernels")
    # grimp takes such a folder for a portion of its own, and import-linter loses its place.
    for init in PACKAGE.rglob("__init__.py"):
        if init.parent != PACKAGE and not (init.parent.parent / "__init__.py").exists():
            yield Finding(init, 1, "is a regular package in a folder that is none")


def _contracts() -> Iterator[Finding]:
    folders = {
        path.relative_to(PACKAGE).parts[0]
        for path in sources("banaserve")
        if path.parent != PACKAGE
    }
    hidden = {name for name in folders if not (PACKAGE / name / "__init__.py").exists()}
    expected = {f"banaserve.{name}" for name in hidden} | {"banaserve"}
    for name in sorted(expected ^ set(SETTINGS["root_packages"])):
        words = "is missing" if name in expected else "is no folder without __init__.py"
        yield at(SETTINGS_FILE, "root_packages", f"{name} {words}: grimp looks for no others")
    contract = next(one for one in SETTINGS["contracts"] if "depend on vllm" in one["name"])
    names = {
        path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for path in sources("banaserve")
        if path.name != "__init__.py"
    }
    expected = {f"banaserve.{name}" for name in names - WITH_VLLM}
    for name in sorted(expected - set(contract["source_modules"])):
        yield at(SETTINGS_FILE, contract["name"], f"{name} is missing in this contract")


def _circles() -> Iterator[Finding]:
    packages = ["banaserve", "benchmarks"]
    modules = find_modules(ROOT, packages)
    # Imports for types count; those inside functions do not.
    declared = read_imports(ROOT, packages).declared
    yield from too_few(PACKAGE, declared, 300, "modules")
    for circle in circles(declared):
        yield Finding(modules[circle[0]], 1, f"imports each other: {', '.join(circle)}")
    for folder in sorted({name.rpartition(".")[0] for name in modules} - {""}):
        # A folder in it stands for all that it holds.
        for circle in circles(entries_of(declared, folder, apart=APART)):
            path = ROOT.joinpath(*folder.split("."))
            yield Finding(path, 1, f"entries import each other: {', '.join(circle)}")
