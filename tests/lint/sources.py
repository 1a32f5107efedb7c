"""Syntax trees of this repository's files, each parsed once in a test process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Not to be changed: other tests look at the same one."""
    return ast.parse(path.read_text())
