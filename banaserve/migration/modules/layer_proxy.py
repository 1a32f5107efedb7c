"""Proxies in a model's list of layers for a range that runs in a guest.

``LayerChain`` calls the layers that stay, in order; ``LayerOrder`` checks that a model passes on
from layer to layer only the values that the layer before has returned.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.attention import get_forward_context
from banaserve.migration.kv import store_copier
from banaserve.migration.modules.eager_break import call_in_break
from banaserve.migration.modules.remote_layers import RemoteLayers
from banaserve.migration.rpc.messages import SlotCopies

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class LayerChain:
    """Chain of layers that calls each layer with the arguments of its signature, by name."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)
        self._names = [_parameters(getattr(m.forward, "__func__", m.forward)) for m in layers]

    def __len__(self) -> int:
        return len(self._layers)

    def run(self, arguments: Mapping[str, Any], around: Around = contextlib.nullcontext) -> Any:
        """Run the layers; return the values of the last one.

        Args:
            arguments: Arguments of the first layer, by parameter name; the other layers get the
                same, except for the values that the layer before has returned.
            around: Factory of contexts; each layer runs within one.
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
    """Return the parameters' names; cached, since chains are made while a move stops the engine."""
    return frozenset(inspect.signature(forward).parameters)


def as_arguments(returned: Any) -> dict[str, Any]:
    """Return a decoder layer's values as the next layer's arguments: all families share names."""
    if isinstance(returned, tuple):
        return dict(zip(("hidden_states", "residual"), returned, strict=False))
    return {"hidden_states": returned}


def by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by parameter name, with those that ``**kwargs`` takes."""
    arguments: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        else:
            arguments[name] = value
    return arguments


class RemoteRange:
    """A range of the model's layers, which can be swapped for proxies and back.

    Args:
        layers: The model's list of layers.
        names: Names of the range's attentions, for which the store's hooks are called.
        where: Channel to the layers in a guest.

    Attributes:
        on_lost: Called once when the guest is lost in the middle of a step.
        where: Channel to the guest that has the layers now.
        signature: Signature of the first layer.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        start: int,
        end: int,
        names: Sequence[str],
        where: RemoteLayers,
        on_lost: Callable[[GuestLostError], None],
    ) -> None:
        self._layers = layers
        self._span = range(start, end)
        self._names = names
        self._own = [layers[i] for i in self._span]
        self.signature = inspect.signature(self._own[0].forward)
        self._returns_residual = "residual" in self.signature.parameters
        self.on_lost = on_lost
        self.where = where

    def __len__(self) -> int:
        return len(self._span)

    def redirect(self, where: RemoteLayers, on_lost: Callable[[GuestLostError], None]) -> None:
        """Run the layers in another guest from now on."""
        self.where, self.on_lost = where, on_lost

    def swap_out(self) -> None:
        """Put proxies in place of the layers; between two steps only."""
        first = RangeProxy(self)
        self._layers[self._span.start] = first
        for index in self._span[1:]:
            self._layers[index] = _Follower(first)

    def swap_in(self) -> None:
        """Put the layers back; a step under way ends with the values of the proxies."""
        for index, layer in zip(self._span, self._own, strict=True):
            self._layers[index] = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the range's part of one step; zeros if the guest is lost or there is no batch."""
        return call_in_break(self._run, self.zeros, by_name(self.signature, args, kwargs))

    def _run(self, arguments: Mapping[str, Any]) -> Any:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self.zeros(arguments)
        try:
            self.wait_for_loads()
            returned = self.returned(self.where.run(arguments, self.slots_to_fill()))
        except GuestLostError as lost:
            self.on_lost(lost)
            return self.zeros(arguments)
        self.save(metadata)
        return returned

    # ---- single actions of a step in parts

    def wait_for_loads(self) -> None:
        """Wait until the blocks that the range reads have been fetched."""
        store_copier.wait_for_loads(self._names)

    def slots_to_fill(self) -> SlotCopies | None:
        """Return the blocks of this step that the guest is to save; None if it is to save none."""
        return store_copier.slots_to_fill() if self.where.can_save else None

    def save(self, metadata: Any) -> None:
        """Report that the range's blocks of this step may be saved, or that the guest did it."""
        save_s = self.where.link.save_s
        if save_s is None:
            store_copier.save_layers(self._names, metadata)
        else:
            store_copier.saved_elsewhere(self._names, save_s)

    def returned(self, values: Sequence[torch.Tensor | None]) -> Any:
        """Return a guest's values in the form of the last layer's values."""
        return tuple(values) if self._returns_residual else values[0]

    def zeros(self, arguments: Mapping[str, Any]) -> Any:
        """Return zeros with which a step goes on whose output will be dropped."""
        zeros = torch.zeros_like(arguments["hidden_states"])
        return (zeros, zeros.clone()) if self._returns_residual else zeros


class RangeProxy(nn.Module):
    """Proxy in the place of the first layer, which runs the whole range."""

    span: RemoteRange

    def __init__(self, span: RemoteRange) -> None:
        super().__init__()
        object.__setattr__(self, "span", span)
        self.returned: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.returned = self.span.forward(args, kwargs)
        return self.returned


class _Follower(nn.Module):
    """Proxy in the place of another layer of the range: passes on the first proxy's values."""

    def __init__(self, first: RangeProxy) -> None:
        super().__init__()
        object.__setattr__(self, "first", first)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.first.returned


def signature_of(layer: nn.Module) -> inspect.Signature:
    """Return the signature of a layer, or of the layer that a proxy replaces."""
    if isinstance(layer, RangeProxy):
        return layer.span.signature
    return inspect.signature(layer.forward)


class LayerOrder:
    """Check of the order of layers in one step of a model.

    Attributes:
        is_known: True once the check is over: all layers were called, or one deviated.
        blocker: Deviation of the model from the expected order; empty if there is none.
    """

    def __init__(self, num_layers: int) -> None:
        self.is_known = False
        self.blocker = ""
        self._num_layers = num_layers
        self._next = 0
        self._signature: inspect.Signature | None = None
        self._expected: dict[str, Any] = {}

    def called(
        self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Check a call of a layer by the model."""
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
        """Record the values that a layer has returned."""
        if self.is_known:
            return
        self._next = index + 1
        self._expected = self._expected | as_arguments(returned)
        if self._next == self._num_layers:
            self._end()

    def _differs(self, why: str) -> None:
        self.blocker = why
        self._end()

    def _end(self) -> None:
        self.is_known = True
        self._expected, self._signature = {}, None
