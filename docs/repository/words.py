"""Rules on words that no other tool checks: docstrings, and one meaning for each class name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs.repository.findings import CODE, ROOT, Finding, nodes_of, sources, tree_of

OPENINGS = {
    *("What", "How", "Which", "Who", "Whose", "Whoever", "Where", "When", "Why", "Whether"),
    *("Of", "From", "If", "That", "Nobody"),
}
"""A docstring of a module that opens with one of these is a clause without its subject."""

ENTRY_OPENINGS = OPENINGS | {
    *("So", "Its", "Their", "His", "It", "They", "He", "This", "These", "Those", "Such", "As"),
    *("By", "With", "Without", "In", "On", "At", "For", "Over", "Until", "Since", "To", "Into"),
    *("Between", "Behind", "Before", "After", "Below", "Above", "Among", "Against", "Within"),
    *("During", "And", "Somebody", "Something", "Everybody", "Is", "Are", "Was", "Has", "Have"),
    *("Had", "Does", "Do", "Can", "May", "Must", "Will", "Then", "There", "Here", "Now"),
    *("Because", "Although"),
}
"""An entry of Args or Attributes that opens with one of these has no noun."""

RIDDLES = re.compile(
    r"\b(nobody|somebody|whoever|whomever|in vain|so many|so much|so long|as yet|told apart"
    r"|held against|comes? further|came further)\b",
    re.IGNORECASE,
)
"""Words that have to be read twice; each has a plain one."""

_SECTION = re.compile(r"^( *)(Args|Attributes):$")
_ENTRY = re.compile(r"^( *)[*\w`][\w`*, .]*: [`\"']*(\w+)")


def findings() -> Iterator[Finding]:
    """Yield modules without a docstring or with a clause as one, and class names used twice."""
    classes: dict[str, list[tuple[Path, int]]] = defaultdict(list)
    for path in sources(*CODE):
        yield from docstring_findings(path, tree_of(path))
        yield from wording_findings(path, tree_of(path))
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


def wording_findings(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Yield the entries of docstrings that have no noun, and the riddles in docstrings."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            continue
        lines = value.value.splitlines()
        for number, line in enumerate(lines):
            if found := RIDDLES.search(line):
                yield Finding(path, value.lineno + number, f"say it plainly: {found[0]}")
        for number, word in _entries(lines):
            if word in ENTRY_OPENINGS:
                words = f"the entry opens with {word}: give it a noun"
                yield Finding(path, value.lineno + number, words)


def _entries(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield the line number and the first word of each entry of Args and Attributes."""
    section = entry = None
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if found := _SECTION.match(line):
            section, entry = indent, None
        elif section is not None and line.strip() and indent <= section:
            section = None
        elif section is not None and (found := _ENTRY.match(line)):
            entry = indent if entry is None else entry
            if indent == entry:
                yield number, found[2]
