"""Rules on words that no other tool checks: module docstrings, and one meaning a class name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from docs.repository.findings import ROOT, Finding, nodes_of, sources, tree_of

OPENINGS = {
    *("What", "How", "Which", "Who", "Whose", "Whoever", "Where", "When", "Why", "Whether"),
    *("Of", "From", "If", "That", "Nobody"),
}
"""A module docstring that opens with one of these is a clause without its subject."""


def findings() -> Iterator[Finding]:
    """Yield modules without a docstring or with a clause as one, and class names used twice."""
    classes: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in sources("banaserve", "benchmarks"):
        yield from docstring_findings(path, tree_of(path))
        for node in nodes_of(path, ast.ClassDef):
            if not node.name.startswith("_"):
                classes[node.name].append((path, node.lineno))
    for name, (first, *others) in classes.items():
        for path, line in others:
            where = first[0].relative_to(ROOT)
            yield Finding(path, line, f"there is a public class {name} in {where} too")


def docstring_findings(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Yield what is wrong with the docstring of a module."""
    words = (ast.get_docstring(tree) or "").split()
    if not words:
        yield Finding(path, 1, "the module has no docstring")
    elif words[0] in OPENINGS:
        yield Finding(path, 1, f"the docstring opens with {words[0]}: give it a noun or a verb")
