"""What banaserve wraps and replaces in vLLM is there, and takes what its functions take."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

pytest.importorskip("vllm")

from banaserve.engine.compat.hooks import HOOKS, Hook

FREE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OF_INSTANCES = {
    "vllm.model_executor.layers.attention.Attention.impl",
    "vllm.v1.core.sched.scheduler.Scheduler.waiting",
}
"""Attributes that only instances have: mypy finds them, and they have no parameters."""


def misfit(hook: Hook, found: Any) -> str:
    """Why banaserve's function does not take what vLLM passes; empty if it does."""
    if hook.parameters is None:
        return ""
    given = [one for one in inspect.signature(found).parameters.values() if one.kind not in FREE]
    if "." in hook.name and not isinstance(found, staticmethod) and inspect.isfunction(found):
        given = given[1:]
    names = [one.name for one in given]
    by_position = [one for one in hook.parameters if one != "..." and not one.endswith("=")]
    by_name = [one[:-1] for one in hook.parameters if one.endswith("=")]
    if names[: len(by_position)] != by_position:
        return f"parameters are {names}"
    if missing := set(by_name) - set(names):
        return f"there is no {sorted(missing)}"
    added = set(names).difference(by_position, by_name)
    return f"also passes {sorted(added)}" if added and "..." not in hook.parameters else ""


ASKED = [hook for hook in HOOKS if hook.path not in OF_INSTANCES]


@pytest.mark.parametrize("hook", ASKED, ids=lambda hook: hook.path)
def test_a_hook_fits_the_installed_vllm(hook: Hook) -> None:
    found: Any = importlib.import_module(hook.module)
    for name in hook.name.split("."):
        found = getattr(found, name)
    assert misfit(hook, found) == ""


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        (("a", "b"), "also passes ['c']"),
        (("a", "b", "c="), ""),
        (("a", "..."), ""),
        (("b",), "parameters are ['a', 'b', 'c']"),
        (("a", "d=", "..."), "there is no ['d']"),
        (None, ""),
    ],
)
def test_a_hook_that_does_not_fit(parameters: tuple[str, ...] | None, said: str) -> None:
    def function(a: int, b: int, c: int = 0) -> None: ...

    assert misfit(Hook("wrapped", "vllm", "function", parameters, ""), function) == said
