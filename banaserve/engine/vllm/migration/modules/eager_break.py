"""Breaks in CUDA graphs at modules that replace those of the model.

A module that asks a guest cannot be captured: a graph that is replayed calls no Python. In a
capture such a module becomes a break, which every replay calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from banaserve.engine.vllm.compat import graphs


def is_capturing() -> bool:
    """Return whether the kernels of this thread are being captured instead of computing."""
    return graphs.capture_under_way() is not None


def call_in_break(call: Callable[[Mapping[str, Any]], Any], arguments: Mapping[str, Any]) -> Any:
    """Return ``call(arguments)``, a tensor or a tuple of tensors and None, row for token.

    In a capture every replay calls it too, and copies what it returns to the tensors that were
    returned first. These have the rows of the graph; if a later call returns fewer, as for a batch
    that is smaller than its graph, the other rows are zero.

    Args:
        arguments: Values that ``call`` gets, by name; in a capture tensors of the graph.
    """
    capture = graphs.capture_under_way()
    if capture is None:
        return call(arguments)
    # The graph owns the memory: a reference would keep later tensors from using it again.
    weak = {name: graphs.weakly(value) for name, value in arguments.items()}
    return capture.add_eager(_Break(lambda: call(weak)))


class _Break:
    """Callable of a graph that returns the same tensors at every call.

    Args:
        call: Function whose values they get.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._static: Any = None

    def __call__(self) -> Any:
        returned = self._call()
        if self._static is None:
            # A copy: a kernel may return a buffer that other layers use too.
            self._static = _each(returned, lambda tensor: tensor.clone())
            return self._static
        for static, new in zip(_tuple(self._static), _tuple(returned), strict=True):
            _fill(static, new)
        return self._static


def _fill(static: torch.Tensor | None, new: torch.Tensor | None) -> None:
    if static is None:
        return
    num_rows = 0 if new is None else len(new)
    if new is not None:
        static[:num_rows].copy_(new)
    static[num_rows:].zero_()


def _tuple(values: Any) -> tuple[Any, ...]:
    return values if isinstance(values, tuple) else (values,)


def _each(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    changed = tuple(None if one is None else change(one) for one in _tuple(values))
    return changed if isinstance(values, tuple) else changed[0]
