"""Links and names of code in documents, and documents that sources name: which are not there.

Links, also their anchors, and paths of documents that sources name, as messages and the page
under ``/ui`` do; names of code in the form ``file.py:function``, ``file.py:Class`` or
``file.py:Class.method``, with the file's path from ``banaserve/`` or the top of the repository; and
no line that a merge has left. ``python -m docs.repository documents`` prints what is found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.repository.findings import PACKAGES, ROOT, Finding

# Pages of the reference and of results are written by ``make docs``, not committed.
REFERENCE = ROOT / "docs" / "reference"
RESULTS = ROOT / "benchmarks" / "results"
REFERENCE_PAGES = ("commands.md", "admin-api.md", "metrics.md", "configuration.md")

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE_NAME = re.compile(r"((?:[\w.-]+/)*[\w-]+\.py):([A-Za-z_]\w*(?:\.\w+)*)")
_DOCUMENT = re.compile(r"(?<![\w./-])(?:docs|benchmarks|docker|examples)/[\w./-]*\.md\b")
_SOURCE_SUFFIXES = {".py", ".js", ".html", ".toml", ".yml", ".yaml", ".json", ".sh"}
_MERGE_MARK = re.compile(r"(<{7}|>{7}) ")
_FENCE = re.compile(r"^\s*(```|~~~)")


def documents() -> list[Path]:
    """Return all committed documents, in the order of their paths."""
    found = [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "benchmarks" / "log").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        ROOT / "docker" / "README.md",
        *(ROOT / name / "README.md" for name in ("kernels", "kvstore", "orchestrator")),
    ]
    return sorted(path for path in found if path.parent != REFERENCE)


def sources() -> list[Path]:
    """Return the files whose text reaches users: programs, the page, files of containers."""
    folders = (ROOT / name for name in (*PACKAGES, "benchmarks", "docker", "examples"))
    found = (path for folder in folders for path in folder.rglob("*.*"))
    return sorted(path for path in found if path.suffix in _SOURCE_SUFFIXES)


def named_documents(source: Path) -> Iterator[Finding]:
    """Yield a finding for each path of a document in a source that leads nowhere in a clone."""
    for number, line in enumerate(source.read_text().splitlines(), start=1):
        for name in _DOCUMENT.findall(line):
            if not (ROOT / name).is_file() or is_built(ROOT / name):
                yield Finding(source, number, f"there is no document {name}")


def is_built(path: Path) -> bool:
    """Return whether only ``make docs`` makes this page: no link in a clone leads to it."""
    if path == RESULTS.with_name("RESULTS.md") or path.parent == REFERENCE:
        return True
    return RESULTS in path.parents and path.suffix != ".json" and not path.is_dir()


def findings_in(document: Path) -> Iterator[Finding]:
    """Yield a finding for each dead link, dead anchor, name that is not there and merge's mark."""
    is_code = False
    for number, line in enumerate(document.read_text().splitlines(), start=1):
        is_code ^= bool(_FENCE.match(line))
        if _MERGE_MARK.match(line):
            yield Finding(document, number, "a merge has left its mark")
        if not is_code:
            for target in _LINK.findall(line):
                if problem := _link_problem(document, target):
                    yield Finding(document, number, problem)
        for path, name in _CODE_NAME.findall(line):
            if problem := code_problem(path, name):
                yield Finding(document, number, problem)


def code_problem(path: str, name: str) -> str:
    """Return why ``path:name`` names nothing, or ""."""
    source = next(
        (top / path for top in (ROOT / "banaserve", ROOT) if (top / path).is_file()), None
    )
    if source is None:
        return f"there is no file {path}"
    return "" if name in names_in(source) else f"{path} has no {name}"


@cache
def names_in(source: Path) -> frozenset[str]:
    """Return the functions, classes and constants of a file, and its classes' members."""
    return frozenset(_names(ast.parse(source.read_text()).body, ""))


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name
            yield from _names(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield prefix + node.target.id
        elif isinstance(node, ast.Assign):
            yield from (prefix + one.id for one in node.targets if isinstance(one, ast.Name))


def _link_problem(document: Path, target: str) -> str:
    if "://" in target or target.startswith("mailto:"):
        return ""
    name, _, anchor = target.partition("#")
    path = (document.parent / name).resolve() if name else document
    if is_built(path):  # nor where an earlier build has left it
        return f"dead link {target}: only `make docs` makes this page"
    if not path.exists():
        return f"dead link {target}"
    if anchor and path.suffix == ".md" and anchor not in _anchors(path):
        return f"{name or document.name} has no heading #{anchor}"
    return ""


@cache
def _anchors(document: Path) -> frozenset[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in headings
    )
