"""The layout that ARCHITECTURE.md describes, where no other tool checks it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from docs.repository.findings import (
    CODE,
    PACKAGE,
    PACKAGES,
    ROOT,
    Finding,
    at,
    sources,
    too_few,
    tree_of,
)

FOLDERS = ("kernels", "kvstore", "orchestrator")
"""Folders at the top that only say where the code of that name is."""
SETTINGS_FILE = ROOT / "pyproject.toml"
SETTINGS: dict[str, Any] = tomllib.loads(SETTINGS_FILE.read_text())["tool"]["importlinter"]
WITH_VLLM = {"cli", "engine", "frontdoor", "mains", "migration", "pacing", "serving"}
"""Packages that may depend on vLLM."""
_ENTRY = re.compile(r"\bEntr(y|ies)\b|Begin at")
APART = {"banaserve.orchestrator.planner"}
"""Folders that count as entries of the folder above their own: the simulator is above ``control``
and below ``planner``."""
MAX_TOP_BYTES = 1_000_000
"""Maximum size of a file at the top, in bytes: a larger one was left there by a download."""
Graph = dict[str, set[str]]


def findings() -> Iterator[Finding]:
    """Yield folders and packages that are not as they must be, and circles of imports."""
    yield from _top()
    yield from _packages()
    yield from _contracts()
    yield from _circles()


def _top() -> Iterator[Finding]:
    for name in FOLDERS:
        held = sorted(path.name for path in (ROOT / name).glob("*"))
        if held != ["README.md"]:
            yield Finding(ROOT / name, 1, f"holds {held}, not only README.md")
    for path in sorted(ROOT.iterdir()):
        if path.is_file() and path.stat().st_size > MAX_TOP_BYTES:
            yield Finding(path, 1, f"has more than {MAX_TOP_BYTES:,} bytes: move it out")


def _packages() -> Iterator[Finding]:
    # A regular package of one of these names would shadow an installed one.
    for path in [*(ROOT / "tests").rglob("__init__.py"), ROOT / "conftest.py"]:
        if path.exists():
            yield Finding(path, 1, "tests are no packages, and the top is not on their path")
    if (ROOT / "benchmarks" / "kernels").exists():
        yield Finding(ROOT / "benchmarks" / "kernels", 1, "shadows the package kernels")
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


def _circles() -> Iterator[Finding]:
    modules, graph = find_modules(ROOT, CODE), read_imports(ROOT, CODE)
    yield from too_few(PACKAGE, graph, 300, "modules")
    if circle := circle_in(graph):
        yield Finding(modules[circle[0]], 1, f"imports each other: {', '.join(circle)}")
    for folder in sorted({name.rpartition(".")[0] for name in modules} - {""}):
        # A folder in it stands for all that it holds.
        if circle := circle_in(entries_of(graph, folder, apart=APART)):
            path = modules.get(folder, PACKAGE)
            yield Finding(path, 1, f"entries import each other: {', '.join(circle)}")


# Imports ------------------------------------------------------------------------------------------


def find_modules(root: Path, packages: Iterable[str]) -> dict[str, Path]:
    """Return the file of each module of ``packages``, folders below ``root``, by its name."""
    found = {}
    for folder in (root / package for package in packages):
        for path in sorted(folder.rglob("*.py")):
            name = ".".join(path.relative_to(folder.parent).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def read_imports(root: Path, packages: Iterable[str]) -> Graph:
    """Return the modules that each module imports, for types too; not those inside functions."""
    paths = find_modules(root, packages)
    graph: Graph = {}
    for module, path in paths.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        names = (name for one in _statements(tree_of(path)) for name in _names(one, package))
        graph[module] = {found for name in names if (found := _module_of(name, paths))} - {module}
    return graph


def _statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _statements(child)


def _names(statement: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    base = ""
    if isinstance(statement, ast.ImportFrom):
        above = package.split(".")[: package.count(".") + 2 - statement.level]
        parts = [*(above if statement.level else ()), statement.module or ""]
        base = ".".join(filter(None, parts)) + "."
    # A name may be a module of the package or something that a module defines.
    yield from (base + alias.name for alias in statement.names)


def _module_of(name: str, paths: dict[str, Path]) -> str:
    while name and name not in paths:
        name = name.rpartition(".")[0]
    return name


def entries_of(graph: Graph, folder: str, apart: Collection[str] = ()) -> Graph:
    """Return the edges between the entries of ``folder``: a folder in it is one entry.

    Args:
        apart: Folders of folders in it that count as entries of their own.
    """

    def entry(module: str) -> str:
        if not module.startswith(f"{folder}."):
            return ""
        first, _, rest = module.removeprefix(f"{folder}.").partition(".")
        second = f"{first}.{rest.partition('.')[0]}"
        return second if f"{folder}.{second}" in apart else first

    edges: Graph = {}
    for module, targets in graph.items():
        if source := entry(module):
            edges.setdefault(source, set()).update({*map(entry, targets)} - {source, ""})
    return edges


def circle_in(graph: Graph) -> list[str]:
    """Return the members of one circle of a graph, sorted; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return sorted(set(error.args[1]))
    return []
