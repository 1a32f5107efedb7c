"""Rules on words that no other tool checks: module docstrings, and one meaning a class name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from sources import tree_of

ROOT = Path(__file__).parents[2]
OPENINGS = {
    *("What", "How", "Which", "Who", "Whose", "Whoever", "Where", "When", "Why", "Whether"),
    *("Of", "From", "If", "That", "Nobody"),
}
"""A module docstring that opens with one of these is a clause without its subject."""


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): tree_of(path)
        for package in ("banaserve", "benchmarks")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def test_every_module_says_what_it_is(modules: dict[str, ast.Module]) -> None:
    missing = [name for name, tree in modules.items() if not ast.get_docstring(tree)]
    assert missing == []


def test_a_module_docstring_opens_with_a_noun_phrase_or_a_verb(
    modules: dict[str, ast.Module],
) -> None:
    docs = {name: ast.get_docstring(tree) or "" for name, tree in modules.items()}
    assert {n: d.splitlines()[0] for n, d in docs.items() if d and d.split()[0] in OPENINGS} == {}


def test_no_two_public_classes_have_one_name(modules: dict[str, ast.Module]) -> None:
    places = defaultdict(list)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
