"""Proxies in a model's list of layers for a range that runs in a guest.

``LayerChain`` calls the layers that stay, one after the other; ``LayerOrder`` checks that a model
only passes on from layer to layer what the last one has returned.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from banaserve.engine.vllm.compat.attention import get_forward_context
from banaserve.engine.vllm.migration.kv import store_copier
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.engine.vllm.migration.rpc.messages import SlotCopies
from banaserve.errors import GuestLostError

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


class LayerChannel(Protocol):
    """Steps of a range of layers that runs elsewhere: what a proxy asks of the far end.

    Each method raises ``GuestLostError`` where the guest is lost.
    """

    @property
    def link(self) -> GuestClient: ...

    @property
    def can_save(self) -> bool:
        """Whether the guest can save blocks of the layers to the store."""
        ...

    def run(
        self, arguments: Mapping[str, Any], saves: SlotCopies | None = None
    ) -> Sequence[torch.Tensor | None]:
        """One step there and back: the first layer's arguments by name, the last one's values.

        Args:
            saves: Blocks that the guest copies to the store; ``link.save_s`` says whether it has.
        """
        ...

    def submit(
        self, arguments: Mapping[str, Any], num_follow: int, saves: SlotCopies | None = None
    ) -> None:
        """Send a part of a step without waiting.

        Args:
            num_follow: Parts that are submitted before anything else is asked of this guest.
            saves: As for ``run``; of the whole step, with its last part.
        """
        ...

    def collect(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """The values for the part that was submitted first, with ``hidden_states``."""
        ...


class RemoteRange:
    """Swaps a range of the model's layers for proxies, and back.

    Args:
        layers: The model's list.
        names: Of the range's attentions: the store's hooks are called for them.
        where: The layers in a guest.
        on_lost: Called once when the guest is lost in the middle of a step.

    Attributes:
        where: Where the layers are.
        signature: Of the first layer.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        start: int,
        end: int,
        names: Sequence[str],
        where: LayerChannel,
        on_lost: Callable[[GuestLostError], None],
    ) -> None:
        self._layers = layers
        self._span = range(start, end)
        self._names = names
        self._own = [layers[i] for i in self._span]
        self.signature = inspect.signature(self._own[0].forward)
        self._returns_residual = "residual" in self.signature.parameters
        self._on_lost = on_lost
        self.where = where

    def __len__(self) -> int:
        return len(self._span)

    def redirect(self, where: LayerChannel, on_lost: Callable[[GuestLostError], None]) -> None:
        """Let another guest do the work."""
        self.where, self._on_lost = where, on_lost

    def swap_out(self) -> None:
        """Put proxies in place of the layers; between two steps only."""
        first = RangeProxy(self)
        self._layers[self._span.start] = first
        for index in self._span[1:]:
            self._layers[index] = _Follower(first)

    def swap_in(self) -> None:
        """Put the layers back; a step that runs ends with what the proxies return."""
        for index, layer in zip(self._span, self._own, strict=True):
            self._layers[index] = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The range's part of one step; zeros where the guest is lost or there is no batch."""
        arguments = by_name(self.signature, args, kwargs)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self.zeros(arguments)
        try:
            self.wait_for_loads()
            returned = self.returned(self.where.run(arguments, self.slots_to_fill()))
        except GuestLostError as lost:
            self.lost(lost)
            return self.zeros(arguments)
        self.save(metadata)
        return returned

    # ---- what a step in parts does one by one

    def wait_for_loads(self) -> None:
        """Return when the blocks that the range reads have been fetched."""
        store_copier.wait_for_loads(self._names)

    def slots_to_fill(self) -> SlotCopies | None:
        """The blocks of this step that the guest is to save; None where it is not to."""
        return store_copier.slots_to_fill() if self.where.can_save else None

    def save(self, metadata: Any) -> None:
        """Say that the range's blocks of this step may be saved, or that the guest has."""
        save_s = self.where.link.save_s
        if save_s is None:
            store_copier.save_layers(self._names, metadata)
        else:
            store_copier.saved_elsewhere(self._names, save_s)

    def returned(self, values: Sequence[torch.Tensor | None]) -> Any:
        """A guest's values as the last layer returns them."""
        return tuple(values) if self._returns_residual else values[0]

    def lost(self, error: GuestLostError) -> None:
        """Say that the guest is lost."""
        self._on_lost(error)

    def zeros(self, arguments: Mapping[str, Any]) -> Any:
        """What a step goes on with whose output will be dropped."""
        zeros = torch.zeros_like(arguments["hidden_states"])
        return (zeros, zeros.clone()) if self._returns_residual else zeros


class RangeProxy(nn.Module):
    """At the place of the first layer: runs them all."""

    span: RemoteRange

    def __init__(self, span: RemoteRange) -> None:
        super().__init__()
        object.__setattr__(self, "span", span)
        self.returned: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.returned = self.span.forward(args, kwargs)
        return self.returned


class _Follower(nn.Module):
    """At the place of another layer of the range: passes on what the first has returned."""

    def __init__(self, first: RangeProxy) -> None:
        super().__init__()
        object.__setattr__(self, "first", first)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.first.returned


def signature_of(layer: nn.Module) -> inspect.Signature:
    """Of a layer, or of the one at whose place a proxy stands."""
    if isinstance(layer, RangeProxy):
        return layer.span.signature
    return inspect.signature(layer.forward)


class LayerOrder:
    """Checks the order of layers in one step of a model.

    Attributes:
        is_known: That step is over.
        blocker: What the model does otherwise; empty where nothing.
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
        self.blocker = why
        self._end()

    def _end(self) -> None:
        self.is_known = True
        self._expected, self._signature = {}, None
