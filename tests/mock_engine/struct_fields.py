"""Fields of vLLM's messages, read in its sources: nothing of vLLM is run."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

_FILES = {
    "v1/engine/__init__.py": (
        "EngineCoreRequest",
        "EngineCoreEvent",
        "EngineCoreOutput",
        "UtilityOutput",
        "EngineCoreOutputs",
        "EngineCoreReadyResponse",
    ),
    "v1/engine/utils.py": ("EngineZmqAddresses", "EngineHandshakeMetadata"),
    "v1/metrics/stats.py": ("PrefillStats", "BaseCacheStats", "PrefixCacheStats", "SchedulerStats"),
}
Structs = dict[str, list[list[str]]]


def fields_in_package(folder: Path) -> Structs:
    """``fields_in`` of an unpacked ``vllm``."""
    return fields_in(lambda name: (folder / name).read_text(encoding="utf-8"))


def fields_in_wheel(path: Path) -> Structs:
    """``fields_in`` of a wheel, which is not unpacked."""
    with ZipFile(path) as wheel:
        return fields_in(lambda name: wheel.read(f"vllm/{name}").decode())


def fields_in(read: Callable[[str], str]) -> Structs:
    """``[name, default]`` of each field of the structs, in order.

    A default is an expression of the source; empty where a field has none.

    Args:
        read: Returns the text of a file of the package ``vllm``.
    """
    found: Structs = {}
    for name, structs in _FILES.items():
        tree = ast.parse(read(name))
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for struct in structs:
            found[struct] = _fields(classes[struct], found)
    del found["BaseCacheStats"]
    return found


def _fields(made: ast.ClassDef, known: Mapping[str, list[list[str]]]) -> list[list[str]]:
    bases = [base.id for base in made.bases if isinstance(base, ast.Name)]
    inherited = [field for base in bases for field in known.get(base, [])]
    return inherited + [
        [node.target.id, ast.unparse(node.value) if node.value is not None else ""]
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def compared(ours: Mapping[str, Sequence[Sequence[str]]], theirs: Structs) -> list[str]:
    """One line for each field that one has and the other has not, elsewhere or otherwise."""
    lines = []
    for struct, fields in ours.items():
        before, after = [tuple(one) for one in fields], [tuple(one) for one in theirs[struct]]
        for place, pair in enumerate(after):
            if pair not in before:
                lines.append(f"{struct}[{place}] is now {_spelt(pair)}")
            elif before.index(pair) != place:
                lines.append(f"{struct}: {pair[0]} is {place} and was {before.index(pair)}")
        gone = {one[0] for one in before} - {one[0] for one in after}
        lines += [f"{struct}: {name} is gone" for name in sorted(gone)]
    return lines


def _spelt(pair: tuple[str, ...]) -> str:
    name, default = pair
    return f"{name} = {default}" if default else name
