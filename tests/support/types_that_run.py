"""The first type of numbers in which plain vLLM runs a model on this processor, found by asking it.

vLLM has no kernel for some models in some types on some processors. No test knows which: the plain
engine that a test needs for its tokens is started in one type after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest

from reference import PlainVllmError

T = TypeVar("T")

TYPES = ("float32", "bfloat16")
"""The type in which answers are compared best comes first."""
_refused: dict[tuple[str, str], str] = {}
"""vLLM's words by model and type, so that no engine is started twice to hear them."""


def first_that_runs(
    model: str, run: Callable[[str], T], types: Sequence[str] = TYPES
) -> tuple[str, T]:
    """The first of ``types`` that ``run`` does not refuse, and what it returns for that type.

    The test is skipped with vLLM's own words where all are refused.

    Args:
        model: The model's folder.
        run: Starts a plain engine of the type that it is given.
    """
    for dtype in types:
        if (model, dtype) not in _refused:
            try:
                return dtype, run(dtype)
            except PlainVllmError as refused:
                _refused[model, dtype] = str(refused)
    said = "; ".join(f"{dtype}: {_refused[model, dtype]}" for dtype in types)
    pytest.skip(f"plain vLLM does not run this model on this processor: {said}")
