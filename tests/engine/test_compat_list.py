"""Signatures of what banaserve relies on in vLLM, asked of the installed vLLM's own objects.

``docs/repository/vllm_names.py`` looks the names up in vLLM's files and in our sources.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.engine.compat.manifest import ENTRIES, Entry, Hook, NameKind
from banaserve.engine.compat.sources import Signature


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


IS_KIND = {
    NameKind.MODULE: inspect.ismodule,
    NameKind.CLASS: inspect.isclass,
    NameKind.FUNCTION: callable,
    NameKind.METHOD: callable,
}


def misfits(entry: Entry) -> Iterator[str]:
    """Lines that say how the installed vLLM's object is not as the list says."""
    try:
        found, is_static = object_of(entry)
    except (AttributeError, ImportError, StopIteration) as error:
        yield f"{entry.path} is missing ({error!r})"
        return
    if not IS_KIND.get(entry.kind, lambda _: True)(found):
        yield f"{entry.path} is no {entry.kind.name.lower()}"
    if entry.parameters is not None:
        signature = signature_of(found, entry, is_static)
        is_hook = entry.hook in (Hook.OVERRIDDEN, Hook.WRAPPED, Hook.REPLACED)
        misfit = signature.misfit_of_hook if is_hook else signature.misfit_of_call
        if words := misfit(entry.parameters):
            yield f"{entry.path}: {words}"


def test_the_installed_vllm_has_every_entry_with_these_parameters() -> None:
    # An attribute is of an instance: the lint finds it in the sources.
    asked = [one for one in ENTRIES if one.kind is not NameKind.ATTRIBUTE]
    assert len(asked) > 100
    assert [line for entry in asked for line in misfits(entry)] == []


def test_what_vllm_has_otherwise_is_a_line() -> None:
    one = next(one for one in ENTRIES if one.kind is NameKind.CLASS)
    changed = [
        replace(one, name="Gone"),
        replace(one, kind=NameKind.MODULE, parameters=None),
        replace(one, module="vllm.gone", alternatives=()),
    ]
    told = [line.partition(" is ")[2].partition(" (")[0] for e in changed for line in misfits(e)]
    assert told == ["missing", "no module", "missing"]
