"""What stands in the model's list of layers for a range that runs in a guest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from banaserve.engine.vllm.migration import store_hooks
from banaserve.engine.vllm.migration.layer_chain import by_name
from banaserve.engine.vllm.migration.messages import SlotCopies
from banaserve.engine.vllm.migration.units import LayersHere
from banaserve.errors import GuestLostError


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
        where: LayersHere,
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

    def redirect(self, where: LayersHere, on_lost: Callable[[GuestLostError], None]) -> None:
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
        store_hooks.wait_for_loads(self._names)

    def slots_to_fill(self) -> SlotCopies | None:
        """The blocks of this step that the guest is to save; None where it is not to."""
        return store_hooks.slots_to_fill() if self.where.can_save else None

    def save(self, metadata: Any) -> None:
        """Say that the range's blocks of this step may be saved, or that the guest has."""
        save_s = self.where.link.save_s
        if save_s is None:
            store_hooks.save_layers(self._names, metadata)
        else:
            store_hooks.saved_elsewhere(self._names, save_s)

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
