"""Findings of the lint, and the sources that its subjects read."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    *("banaserve", "bench/banaserve_bench"),
    *("plugins/mooncake/banaserve_mooncake", "route/banaserve_route"),
)
"""Folders of the packages that are installed: the core, and those that need it."""
PACKAGE = ROOT / "banaserve"
CODE = (*PACKAGES, "benchmarks")
"""Folders whose code the rules on words and uses of vLLM hold for."""
Node = TypeVar("Node", bound=ast.AST)


class Finding(NamedTuple):
    """A line of a file that breaks a rule of the repository.

    Attributes:
        words: The broken rule, or what was found in place of what.
    """

    path: Path
    line: int
    words: str

    def __str__(self) -> str:
        path = self.path.relative_to(ROOT) if ROOT in self.path.parents else self.path
        return f"{path}:{self.line}: {self.words}"


def too_few(path: Path, found: Sized, least: int, what: str) -> Iterator[Finding]:
    """Yield a finding where a check has seen so little that it would miss what it is there for."""
    if len(found) < least:
        yield Finding(
            path, 1, f"only {len(found)} {what} are recognised here: has the form changed?"
        )


def at(path: Path, text: str, words: str) -> Finding:
    """Return a finding at the first line of ``path`` that holds ``text``, else at line 1."""
    lines = path.read_text().splitlines() if path.is_file() else []
    number = next((n for n, line in enumerate(lines, start=1) if text in line), 1)
    return Finding(path, number, words)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once for all subjects; not to be changed."""
    return ast.parse(path.read_text())


def nodes_of(path: Path, kind: type[Node]) -> Iterator[Node]:
    """Yield the nodes of a file's syntax tree that are of one class, subclasses left out."""
    yield from _nodes_by_kind(path).get(kind, ())  # type: ignore[misc]


@functools.cache
def _nodes_by_kind(path: Path) -> dict[type, list[ast.AST]]:
    """All nodes, collected once for all subjects: ``ast.walk`` takes twice the time, each time."""
    found: dict[type, list[ast.AST]] = defaultdict(list)
    left: list[ast.AST] = [tree_of(path)]
    while left:
        node = left.pop()
        found[type(node)].append(node)
        for value in node.__dict__.values():
            if isinstance(value, list):
                left += [one for one in value if isinstance(one, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                left.append(value)
    return dict(found)


@functools.cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Return all Python files of folders at the top of the repository."""
    return tuple(path for one in folders for path in sorted((ROOT / one).rglob("*.py")))
