"""Uses of vLLM: names of its modules only in ``engine/compat``, hooks only as its list has them.

Import contracts find imports elsewhere, ruff private names of other objects, and mypy checks all
other uses against the installed vLLM.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from banaserve.engine.compat.hooks import HOOKS, SET_ATTRIBUTES
from docs.repository.findings import CODE, PACKAGE, ROOT, Finding, nodes_of, sources

COMPAT = PACKAGE / "engine" / "compat"
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
HOOKED = {hook.name.rpartition(".")[2] for hook in HOOKS}
"""Last parts of the names that banaserve wraps or replaces."""
SET = {name for names in SET_ATTRIBUTES.values() for name in names.split()}
OF_STARLETTE = {"app.state.server", "app.middleware_stack"}
SERVER_TO_RUN = "vllm.entrypoints.openai.api_server"
"""The documented command of vLLM's own server."""
NEAR_VLLM = (
    "banaserve/cli",
    "banaserve/engine",
    "banaserve/frontdoor",
    "banaserve/mains",
    "banaserve/migration",
    "banaserve/pacing",
    "banaserve/serving",
    "benchmarks/drivers",
)
"""Folders whose files handle objects of vLLM."""
_MODULE = re.compile(r"vllm(\.\w+)+")


def findings() -> Iterator[Finding]:
    """Yield hooks that are not in the list, and uses of vLLM outside of compat."""
    yield from count_findings(ROOT / "README.md")
    for path in sorted(COMPAT.rglob("*.py")):
        yield from use_findings(path)
    for path in sources(*CODE):
        if COMPAT not in path.parents:
            yield from outside_findings(path)
            if str(path.relative_to(ROOT)).startswith(NEAR_VLLM):
                yield from near_findings(path)


def count_findings(readme: Path) -> Iterator[Finding]:
    """Yield a README that does not say how much of vLLM is changed at run time."""
    words = f"{len(HOOKS)} of its functions, classes and values are wrapped or replaced"
    if words not in readme.read_text():
        yield Finding(readme, 1, f"does not say that {words}")


def use_findings(path: Path) -> Iterator[Finding]:
    """Yield hooks of a module of compat that are not in the list."""
    for node in _attributes(path, ast.Store):
        text = ast.unparse(node)
        is_known = node.attr in HOOKED | SET or text in OF_STARLETTE
        if ast.unparse(node.value) != "self" and not is_known:
            yield Finding(path, node.lineno, f"{text} is set, and the list does not say so")
    for call in _calls(path, "_wrap"):
        if ast.literal_eval(call.args[1]) not in HOOKED:
            yield Finding(path, call.lineno, f"{ast.unparse(call)}, and the list does not say so")


# Our own sources ----------------------------------------------------------------------------------


def outside_findings(path: Path) -> Iterator[Finding]:
    """Yield names of vLLM's modules as ``importlib`` or a patch takes them."""
    for node in nodes_of(path, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        if text != SERVER_TO_RUN and _MODULE.fullmatch(text):
            yield Finding(path, node.lineno, f"names {text}, outside of compat")


def near_findings(path: Path) -> Iterator[Finding]:
    """Yield hooks into vLLM outside of compat."""
    for node in _attributes(path, ast.Load):
        if node.attr in HOOKED and PRIVATE.fullmatch(node.attr):
            # A subclass would come by it through self, which ruff permits.
            yield Finding(path, node.lineno, f"{ast.unparse(node)} is a private name of vLLM")
    for node in _attributes(path, ast.Store):
        if node.attr in HOOKED and ast.unparse(node.value) != "self":
            yield Finding(path, node.lineno, f"{ast.unparse(node)} replaces a part of vLLM")


def _attributes(path: Path, context: type[ast.expr_context]) -> Iterator[ast.Attribute]:
    return (node for node in nodes_of(path, ast.Attribute) if isinstance(node.ctx, context))


def _calls(path: Path, function: str) -> Iterator[ast.Call]:
    for call in nodes_of(path, ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id == function:
            yield call
