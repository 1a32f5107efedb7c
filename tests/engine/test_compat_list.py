"""The list of what banaserve relies on in vLLM, against the installed vLLM and our own sources."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.engine.vllm.compat.checker import check
from banaserve.engine.vllm.compat.manifest import ENTRIES, Entry, Hook, NameKind
from banaserve.engine.vllm.compat.sources import FolderFiles, Signature, Sources
from sources import tree_of

ROOT = Path(__file__).parents[2]
COMPAT = ROOT / "banaserve" / "engine" / "vllm" / "compat"
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


@pytest.fixture(scope="module")
def installed() -> Sources:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Sources(FolderFiles(Path(spec.origin).parents[1]))


def named(entry: Entry) -> str:
    return entry.path


def object_of(entry: Entry) -> tuple[Any, bool]:
    """What the installed vLLM has by this name, and whether it is a static method."""
    places = [entry.module, *entry.alternatives]
    module = next(place for place in places if importlib.util.find_spec(place) is not None)
    found: Any = importlib.import_module(module)
    is_static = False
    for name in entry.name.split(".") if entry.name else ():
        if inspect.isclass(found):
            is_static = isinstance(inspect.getattr_static(found, name), staticmethod)
        found = getattr(found, name)
    return found, is_static


def signature_of(found: Any, entry: Entry, is_static: bool) -> Signature:
    given = list(inspect.signature(found).parameters.values())
    if entry.kind is NameKind.METHOD and inspect.isfunction(found) and not is_static:
        given = given[1:]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = {one.kind for one in given}
    return Signature(
        tuple(one.name for one in given if one.kind in by_place),
        tuple(one.name for one in given if one.kind is inspect.Parameter.KEYWORD_ONLY),
        frozenset(one.name for one in given if one.default is one.empty and one.kind not in free),
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


@pytest.mark.parametrize(
    "entry", [one for one in ENTRIES if one.kind is not NameKind.ATTRIBUTE], ids=named
)
def test_the_installed_vllm_has_it_with_these_parameters(entry: Entry) -> None:
    found, is_static = object_of(entry)
    if entry.kind is NameKind.MODULE:
        assert inspect.ismodule(found)
    elif entry.kind is NameKind.CLASS:
        assert inspect.isclass(found)
    elif entry.kind in (NameKind.FUNCTION, NameKind.METHOD):
        assert callable(found)
    if entry.parameters is None:
        return
    signature = signature_of(found, entry, is_static)
    if entry.hook in (Hook.OVERRIDDEN, Hook.WRAPPED, Hook.REPLACED):
        assert signature.misfit_of_hook(entry.parameters) == ""
    else:
        assert signature.misfit_of_call(entry.parameters) == ""


def test_the_sources_of_the_installed_vllm_hold_every_entry(installed: Sources) -> None:
    found = check(ENTRIES, installed)
    assert [(one.entry.path, one.breaks) for one in found if one.breaks] == []


def test_no_entry_stands_twice_for_one_use() -> None:
    seen = [(one.group, one.path, one.hook) for one in ENTRIES]
    assert len(seen) == len(set(seen))


def test_every_entry_names_its_module_of_compat_and_its_purpose() -> None:
    groups = {one.group for one in ENTRIES}
    assert groups == {
        path.stem for path in COMPAT.glob("*.py") if any(True for _ in vllm_imports(path))
    }
    assert all(one.purpose for one in ENTRIES)


# ---- our own sources


def vllm_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Module and name of each import of vLLM, wherever it stands in a file."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            for alias in node.names:
                yield node.module or "", alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "vllm":
                    yield alias.name, ""


def outside() -> list[Path]:
    files = [*(ROOT / "banaserve").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    return [path for path in files if COMPAT not in path.parents]


def near_vllm() -> list[Path]:
    """Files that handle objects of vLLM."""
    folders = ("banaserve/engine/vllm", "banaserve/api", "banaserve/cli", "benchmarks/drivers")
    return [path for path in outside() if str(path.relative_to(ROOT)).startswith(folders)]


def attributes(path: Path, context: type[ast.expr_context]) -> Iterator[ast.Attribute]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, context):
            yield node


@pytest.mark.parametrize("path", sorted(COMPAT.glob("*.py")), ids=lambda path: path.name)
def test_what_compat_imports_stands_in_the_list(path: Path) -> None:
    listed = {
        (module, one.name)
        for one in ENTRIES
        if one.group == path.stem
        for module in (one.module, *one.alternatives)
    }
    modules = {module for module, _ in listed}
    for module, name in vllm_imports(path):
        if name:
            assert (module, name) in listed, f"{module}.{name}"
        else:
            assert module in modules, module


@pytest.mark.parametrize("path", sorted(COMPAT.glob("*.py")), ids=lambda path: path.name)
def test_what_compat_touches_of_vllms_objects_stands_in_the_list(path: Path) -> None:
    names = {one.name.rpartition(".")[2] for one in ENTRIES}
    hooked = {one.name.rpartition(".")[2] for one in ENTRIES if one.hook in HOOKED}
    own = {node.attr for node in attributes(path, ast.Store) if ast.unparse(node.value) == "self"}
    for node in attributes(path, ast.Load):
        if PRIVATE.fullmatch(node.attr) and ast.unparse(node.value) != "os":
            method_here = re.search(rf"def {node.attr}\b", path.read_text())
            assert node.attr in names | own or method_here, ast.unparse(node)
    for node in attributes(path, ast.Store):
        text = ast.unparse(node)
        if ast.unparse(node.value) != "self" and text not in OF_STARLETTE:
            assert node.attr in hooked, text
    for call in ast.walk(tree_of(path)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_wrap":
            assert ast.literal_eval(call.args[1]) in hooked, ast.unparse(call)


def test_nothing_outside_compat_imports_vllm() -> None:
    found = [(str(path), place) for path in outside() for place in vllm_imports(path)]
    assert found == []


def test_no_module_of_vllm_is_named_outside_compat() -> None:
    """As ``importlib.import_module`` or a patch would take it."""
    module = re.compile(r"vllm(\.\w+)+")
    found = [
        (str(path), node.value)
        for path in outside()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and module.fullmatch(node.value)
        and node.value != SERVER_TO_RUN
    ]
    assert found == []


def test_no_private_name_of_another_object_is_used_near_vllm() -> None:
    found = []
    for path in near_vllm():
        own = re.findall(r"def (_\w+)", path.read_text())
        for node in attributes(path, ast.Load):
            text = ast.unparse(node)
            if not PRIVATE.fullmatch(node.attr) or ast.unparse(node.value) in ("self", "cls"):
                continue
            if text not in OF_OTHERS and node.attr not in own:
                found.append((str(path), text))
    assert found == []


def test_no_subclass_outside_compat_uses_a_private_name_of_its_base() -> None:
    private = {one.name.rpartition(".")[2] for one in ENTRIES} - {"_sample"}
    private = {name for name in private if PRIVATE.fullmatch(name)}
    found = [
        (str(path), ast.unparse(node))
        for path in near_vllm()
        for node in attributes(path, ast.Load)
        if node.attr in private
    ]
    assert found == []


def test_nothing_of_vllm_is_wrapped_or_replaced_outside_compat() -> None:
    hooked = {
        one.name.rpartition(".")[2] for one in ENTRIES if one.hook in (Hook.WRAPPED, Hook.REPLACED)
    }
    found = []
    for path in near_vllm():
        for node in attributes(path, ast.Store):
            if node.attr in hooked and ast.unparse(node.value) != "self":
                found.append((str(path), ast.unparse(node)))
        for call in ast.walk(tree_of(path)):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "setattr":
                continue
            name = call.args[1]
            if isinstance(name, ast.Constant) and name.value in hooked:
                found.append((str(path), ast.unparse(call)))
    assert found == []
