"""Breaks in CUDA graphs at modules that replace those of the model.

A module that asks a guest cannot be captured: a graph that is replayed calls no Python. In a
capture such a module becomes a break, which every replay calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from banaserve.engine.compat.runner import graphs

Given = Mapping[str, Any]


def is_capturing() -> bool:
    """Return whether the kernels of this thread are being captured instead of computing."""
    return graphs.capture_under_way() is not None


def call_in_break(call: Callable[[Given], Any], blank: Callable[[Given], Any], given: Given) -> Any:
    """Return ``call(given)``: a tensor or a tuple of tensors and None, with a row for each token.

    In a capture, the tensors of ``blank(given)`` are returned instead, and every replay copies into
    them what ``call(given)`` returns then. If that has fewer rows, as for a batch that is smaller
    than its graph, the other rows are zero.

    Args:
        blank: Function that returns new tensors like those of ``call`` without reading any: in a
            capture, tensors have no values yet.
        given: Values by name; in a capture tensors of the graph.
    """
    capture = graphs.capture_under_way()
    if capture is None:
        return call(given)
    # The graph owns the memory: a reference would keep later tensors from using it again.
    weak = {name: graphs.weakly(value) for name, value in given.items()}
    return capture.add_eager(_Break(lambda: call(weak), lambda: blank(weak)))


class _Break:
    """Callable of a graph; the first call is in the capture, and the others are in replays."""

    def __init__(self, call: Callable[[], Any], blank: Callable[[], Any]) -> None:
        self._call = call
        self._blank = blank
        self._static: Any = None

    def __call__(self) -> Any:
        if self._static is None:
            # Made here and not before: now nothing is captured, and the graph reads these.
            self._static = self._blank()
        else:
            for static, new in zip(_tuple(self._static), _tuple(self._call()), strict=True):
                _fill(static, new)
        return self._static


def _fill(static: torch.Tensor, new: torch.Tensor | None) -> None:
    num_rows = 0 if new is None else len(new)
    if new is not None:
        static[:num_rows].copy_(new)
    static[num_rows:].zero_()


def _tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)
