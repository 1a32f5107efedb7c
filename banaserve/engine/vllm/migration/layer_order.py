"""Whether a model only passes on from layer to layer what the last one has returned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from banaserve.engine.vllm.migration.layer_chain import as_arguments, by_name
from banaserve.engine.vllm.migration.layer_proxy import RangeProxy


def signature_of(layer: nn.Module) -> inspect.Signature:
    """Of a layer, or of the one at whose place a proxy stands."""
    if isinstance(layer, RangeProxy):
        return layer.span.signature
    return inspect.signature(layer.forward)


class LayerOrder:
    """Looks at one step of a model.

    Attributes:
        is_known: That step is over.
        why_not: What the model does otherwise; empty where nothing.
    """

    def __init__(self, num_layers: int) -> None:
        self.is_known = False
        self.why_not = ""
        self._num_layers = num_layers
        self._next = 0
        self._signature: inspect.Signature | None = None
        self._expected: dict[str, Any] = {}

    def called(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """The model calls a layer."""
        if self.is_known:
            return
        if index == 0:
            self._signature = signature_of(layer)
            self._expected, self._next = by_name(self._signature, args, kwargs), 0
        if index != self._next or self._signature is None:
            self._differs(f"its layer {index} is called out of turn")
            return
        try:
            given = by_name(self._signature, args, kwargs)
        except TypeError:
            self._differs(f"its layer {index} has other arguments than the first")
            return
        for name, value in given.items():
            if value is not self._expected.get(name):
                self._differs(f"its layer {index} gets {name} from elsewhere than the one before")
                return

    def returned(self, index: int, returned: Any) -> None:
        """The layer has returned."""
        if self.is_known:
            return
        self._next = index + 1
        self._expected = self._expected | as_arguments(returned)
        if self._next == self._num_layers:
            self._end()

    def _differs(self, why: str) -> None:
        self.why_not = why
        self._end()

    def _end(self) -> None:
        self.is_known = True
        self._expected, self._signature = {}, None
