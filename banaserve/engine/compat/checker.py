"""Comparison of the list of names that banaserve relies on with the sources of a vLLM version."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from banaserve.engine.compat.manifest import Entry, Hook, NameKind
from banaserve.engine.compat.sources import Definition, Function, Sources

_HOOKS_THAT_TAKE = (Hook.OVERRIDDEN, Hook.WRAPPED, Hook.REPLACED)
_MOST_HOMES = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of comparing one entry.

    Attributes:
        breaks: Description of what has changed in vLLM; empty if the entry holds.
        note: Alternative module in which the entry holds, if it is not the first; else empty.
    """

    entry: Entry
    breaks: str = ""
    note: str = ""


def check(entries: Iterable[Entry], sources: Sources) -> list[Comparison]:
    """Compare each entry with the sources, in the order of the list."""
    known = list(entries)
    return [_check(entry, sources, known) for entry in known]


def _check(entry: Entry, sources: Sources, known: Sequence[Entry]) -> Comparison:
    breaks = _breaks(entry, sources, known)
    if not breaks:
        return Comparison(entry)
    for module in entry.alternatives:
        if not _breaks(entry.in_module(module), sources, known):
            return Comparison(entry, note=f"in {module}")
    if entry.alternatives:
        places = " nor ".join([entry.module, *entry.alternatives])
        breaks = f"holds in neither {places}: {breaks}"
    return Comparison(entry, breaks)


def _breaks(entry: Entry, sources: Sources, known: Sequence[Entry]) -> str:
    """Return a description of what has changed in vLLM; empty if the entry holds."""
    if not entry.name:
        return "" if sources.module(entry.module) is not None else "module is missing"
    found = sources.find(entry.module, entry.name)
    if found is None:
        return _missing(entry, sources)
    return (
        _breaks_of_kind(entry, found)
        or _breaks_of_parameters(entry, found, sources)
        or _breaks_of_base(entry, found, sources, known)
    )


def _missing(entry: Entry, sources: Sources) -> str:
    top, _, rest = entry.name.partition(".")
    if rest and sources.find(entry.module, top) is not None:
        return f"{top} has no {rest}"
    homes = [home for home in sources.homes(top) if home != entry.module]
    if homes and len(homes) <= _MOST_HOMES:
        return f"moved to {', '.join(homes)}"
    if sources.module(entry.module) is None:
        return f"module {entry.module} is missing"
    return "missing"


def _breaks_of_kind(entry: Entry, found: Definition) -> str:
    if found.node is None:
        return ""
    is_class, is_function = isinstance(found.node, ast.ClassDef), isinstance(found.node, Function)
    if entry.kind is NameKind.CLASS and not is_class:
        return "is no class"
    if entry.kind in (NameKind.FUNCTION, NameKind.METHOD) and not is_function:
        return f"is no {entry.kind.value}"
    return ""


def _breaks_of_parameters(entry: Entry, found: Definition, sources: Sources) -> str:
    if entry.parameters is None or found.node is None:
        return ""
    signature = sources.signature(found, is_member=entry.kind is NameKind.METHOD)
    if signature is None:
        return ""
    if entry.hook in _HOOKS_THAT_TAKE:
        return signature.misfit_of_hook(entry.parameters)
    return signature.misfit_of_call(entry.parameters)


def _breaks_of_base(
    entry: Entry, found: Definition, sources: Sources, known: Sequence[Entry]
) -> str:
    """Return the abstract members of a base class that its subclasses here lack; empty for none."""
    if entry.hook is not Hook.IMPLEMENTED or not isinstance(found.node, ast.ClassDef):
        return ""
    prefix = f"{entry.name}."
    defined = {
        one.name.removeprefix(prefix)
        for one in known
        if one.module == entry.module and one.name.startswith(prefix)
    }
    asked = sources.abstract_members(found) - defined
    return f"subclasses must define {', '.join(sorted(asked))} too" if asked else ""
