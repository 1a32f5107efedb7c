"""The list of what banaserve relies on in vLLM, against the installed vLLM and our own sources.

vLLM's files are read, not imported; ``tests/engine/test_compat_list.py`` asks its modules.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from banaserve.engine.compat.checker import check
from banaserve.engine.compat.manifest import ENTRIES, Hook
from banaserve.engine.compat.sources import FolderFiles, Sources
from docs.repository.findings import CODE, PACKAGE, ROOT, Finding, at, nodes_of, sources

COMPAT = PACKAGE / "engine" / "compat"
MANIFEST = COMPAT / "manifest.py"
PRIVATE = re.compile(r"_[a-zA-Z]\w*")
HOOKED = (Hook.SET, Hook.REPLACED, Hook.WRAPPED)
OF_STARLETTE = {"app.state.server", "app.middleware_stack"}
SERVER_TO_RUN = "vllm.entrypoints.openai.api_server"
"""The documented command of vLLM's own server."""
OF_OTHERS = {
    "REGISTRY._collector_to_names",  # prometheus_client's, which lists its collectors nowhere else
    "os._exit",
    "parser._actions",  # argparse's
    "sample._replace",  # a named tuple's
    "ssl._create_unverified_context",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported",
}
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
    """Yield entries that do not hold, and uses of vLLM outside of the list or of compat."""
    yield from _list_findings()
    yield from count_findings(ROOT / "README.md")
    for path in sorted(COMPAT.glob("*.py")):
        yield from import_findings(path)
        yield from use_findings(path)
    for path in sources(*CODE):
        if COMPAT not in path.parents:
            yield from outside_findings(path)
            if str(path.relative_to(ROOT)).startswith(NEAR_VLLM):
                yield from near_findings(path)


def count_findings(readme: Path) -> Iterator[Finding]:
    """Yield a README that does not say how much of vLLM is changed at run time."""
    number = len({entry.path for entry in ENTRIES if entry.hook in (Hook.WRAPPED, Hook.REPLACED)})
    words = f"{number} of its functions and classes are wrapped or replaced"
    if words not in readme.read_text():
        yield Finding(readme, 1, f"does not say that {words}")


def _name(entry_name: str) -> str:
    return entry_name.rpartition(".")[2]


# The list -----------------------------------------------------------------------------------------


def _list_findings() -> Iterator[Finding]:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        print("vLLM is not installed: its names are not looked up", file=sys.stderr)
    else:
        for found in check(ENTRIES, Sources(FolderFiles(Path(spec.origin).parents[1]))):
            if found.breaks:
                yield _in_list(found.entry.path, found.breaks)
    uses = Counter((one.group, one.path, one.hook) for one in ENTRIES)
    for (group, path, _), count in uses.items():
        if count > 1:
            yield _in_list(path, f"stands {count} times for one use in {group}")
    importing = {path.stem for path in COMPAT.glob("*.py") if any(vllm_imports(path))}
    for group in sorted({one.group for one in ENTRIES} ^ importing):
        yield Finding(COMPAT / f"{group}.py", 1, "is not both a module and a group of the list")
    for one in ENTRIES:
        if not one.purpose:
            yield _in_list(one.path, "has no purpose")


def _in_list(path: str, words: str) -> Finding:
    """A finding at the entry's name in the list, which says a module once for many entries."""
    return at(MANIFEST, _name(path), f"{path}: {words}")


def vllm_imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name of each import of vLLM, wherever it stands in a file."""
    for node in nodes_of(path, ast.ImportFrom):
        if (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.lineno, node.module or "", alias.name
    for plain in nodes_of(path, ast.Import):
        for alias in plain.names:
            if alias.name.split(".")[0] == "vllm":
                yield plain.lineno, alias.name, ""


def import_findings(path: Path) -> Iterator[Finding]:
    """Yield imports of a module of compat that are not in the list under its name."""
    listed = {
        (module, one.name)
        for one in ENTRIES
        if one.group == path.stem
        for module in (one.module, *one.alternatives)
    }
    modules = {module for module, _ in listed}
    for line, module, name in vllm_imports(path):
        if (module, name) not in listed if name else module not in modules:
            yield Finding(path, line, f"{module}.{name} is not in the list".replace(". ", " "))


def use_findings(path: Path) -> Iterator[Finding]:
    """Yield private names and hooks of a module of compat that are not in the list."""
    names = {_name(one.name) for one in ENTRIES}
    hooked = {_name(one.name) for one in ENTRIES if one.hook in HOOKED}
    own = {one.attr for one in _attributes(path, ast.Store) if ast.unparse(one.value) == "self"}
    known = names | own | _functions(path)
    for node in _attributes(path, ast.Load):
        is_known = node.attr in known or ast.unparse(node.value) == "os"
        if PRIVATE.fullmatch(node.attr) and not is_known:
            yield Finding(path, node.lineno, f"{ast.unparse(node)} is not in the list")
    for node in _attributes(path, ast.Store):
        text = ast.unparse(node)
        is_known = node.attr in hooked or text in OF_STARLETTE
        if ast.unparse(node.value) != "self" and not is_known:
            yield Finding(path, node.lineno, f"{text} is set, and the list does not say so")
    for call in _calls(path, "_wrap"):
        if ast.literal_eval(call.args[1]) not in hooked:
            yield Finding(path, call.lineno, f"{ast.unparse(call)}, and the list does not say so")


# Our own sources ----------------------------------------------------------------------------------


def outside_findings(path: Path) -> Iterator[Finding]:
    """Yield imports of vLLM, and names of its modules as ``importlib`` or a patch takes them."""
    for line, module, _ in vllm_imports(path):
        yield Finding(path, line, f"imports {module}: only {COMPAT.relative_to(ROOT)} does")
    for node in nodes_of(path, ast.Constant):
        text = node.value if isinstance(node.value, str) else ""
        if text != SERVER_TO_RUN and _MODULE.fullmatch(text):
            yield Finding(path, node.lineno, f"names {text}, outside of compat")


def near_findings(path: Path) -> Iterator[Finding]:
    """Yield private names of other objects, and hooks into vLLM, outside of compat."""
    private = {_name(one.name) for one in ENTRIES} - {"_sample"}
    private = {name for name in private if PRIVATE.fullmatch(name)}
    hooks = (Hook.WRAPPED, Hook.REPLACED)
    hooked = {_name(one.name) for one in ENTRIES if one.hook in hooks}
    own = _functions(path)
    for node in _attributes(path, ast.Load):
        text, value = ast.unparse(node), ast.unparse(node.value)
        if node.attr in private:
            # A subclass would come by it through self.
            yield Finding(path, node.lineno, f"{text} is a private name of vLLM")
        elif PRIVATE.fullmatch(node.attr) and not (
            value in ("self", "cls") or text in OF_OTHERS or node.attr in own
        ):
            yield Finding(path, node.lineno, f"{text} is a private name of another object")
    for node in _attributes(path, ast.Store):
        if node.attr in hooked and ast.unparse(node.value) != "self":
            yield Finding(path, node.lineno, f"{ast.unparse(node)} replaces a part of vLLM")
    for call in _calls(path, "setattr"):
        name = call.args[1]
        if isinstance(name, ast.Constant) and name.value in hooked:
            yield Finding(path, call.lineno, f"{ast.unparse(call)} replaces a part of vLLM")


def _attributes(path: Path, context: type[ast.expr_context]) -> Iterator[ast.Attribute]:
    return (node for node in nodes_of(path, ast.Attribute) if isinstance(node.ctx, context))


def _calls(path: Path, function: str) -> Iterator[ast.Call]:
    for call in nodes_of(path, ast.Call):
        if isinstance(call.func, ast.Name) and call.func.id == function:
            yield call


def _functions(path: Path) -> set[str]:
    found = {node.name for node in nodes_of(path, ast.FunctionDef)}
    return found | {node.name for node in nodes_of(path, ast.AsyncFunctionDef)}
