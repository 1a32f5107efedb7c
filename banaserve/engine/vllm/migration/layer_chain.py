"""Decoder layers that are called one after the other, as a model's own loop does."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class LayerChain:
    """Calls each layer with those arguments that it has, by name."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._names = [_parameters(getattr(m.forward, "__func__", m.forward)) for m in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def run(self, arguments: Mapping[str, Any], around: Around = contextlib.nullcontext) -> Any:
        """What the last layer returns.

        Args:
            arguments: Of the first layer, by parameter name; those of the others are the same
                but for what the layer before has returned.
            around: Each layer runs within one.
        """
        given = dict(arguments)
        returned: Any = None
        for layer, names in zip(self._layers, self._names, strict=True):
            with around():
                returned = layer(**{k: v for k, v in given.items() if k in names})
            given |= as_arguments(returned)
        return returned


@functools.cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    """By name; kept because a chain is made while an engine stands still for a move."""
    return frozenset(inspect.signature(forward).parameters)


def as_arguments(returned: Any) -> dict[str, Any]:
    """What a decoder layer returns, as the next one takes it: all families agree on the names."""
    if isinstance(returned, tuple):
        return dict(zip(("hidden_states", "residual"), returned, strict=False))
    return {"hidden_states": returned}


def by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by parameter name; what ``**kwargs`` takes is among them."""
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return arguments
