"""What stands in the model's list of layers for a range that runs in a guest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.forward_context import get_forward_context

from banaserve.engine.vllm.migration import store_hooks
from banaserve.errors import GuestLostError

RunRange = Callable[[Mapping[str, Any]], Sequence[torch.Tensor | None]]
"""Takes the first layer's arguments by name; returns what the last layer returns, as a tuple."""


class RemoteRange:
    """Swaps a range of the model's layers for proxies, and back.

    Args:
        layers: The model's list.
        names: Of the range's attentions: the store's hooks are called for them.
        run: One round trip to the guest.
        on_lost: Called once when the guest is lost in the middle of a step.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        start: int,
        end: int,
        names: Sequence[str],
        run: RunRange,
        on_lost: Callable[[GuestLostError], None],
    ) -> None:
        self._layers = layers
        self._span = range(start, end)
        self._names = names
        self._own = [layers[i] for i in self._span]
        self._signature = inspect.signature(self._own[0].forward)
        self._returns_residual = "residual" in self._signature.parameters
        self._on_lost = on_lost
        self.run = run

    def redirect(self, run: RunRange, on_lost: Callable[[GuestLostError], None]) -> None:
        """Let another guest do the work."""
        self.run, self._on_lost = run, on_lost

    def swap_out(self) -> None:
        """Put proxies in place of the layers; between two steps only."""
        head = _Head(self)
        self._layers[self._span.start] = head
        for index in self._span[1:]:
            self._layers[index] = _Follower(head)

    def swap_in(self) -> None:
        """Put the layers back; a step that runs ends with what the proxies return."""
        for index, layer in zip(self._span, self._own, strict=True):
            self._layers[index] = layer

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The range's part of one step; zeros where the guest is lost or there is no batch."""
        arguments = self._by_name(args, kwargs)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self._zeros(arguments)
        try:
            store_hooks.wait_for_loads(self._names)
            returned = self.run(arguments)
        except GuestLostError as lost:
            self._on_lost(lost)
            return self._zeros(arguments)
        store_hooks.save_layers(self._names, metadata)
        return tuple(returned) if self._returns_residual else returned[0]

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= value
            else:
                arguments[name] = value
        return arguments

    def _zeros(self, arguments: Mapping[str, Any]) -> Any:
        zeros = torch.zeros_like(arguments["hidden_states"])
        return (zeros, zeros.clone()) if self._returns_residual else zeros


class _Head(nn.Module):
    """At the place of the first layer: runs them all."""

    def __init__(self, span: RemoteRange) -> None:
        super().__init__()
        object.__setattr__(self, "span", span)
        self.returned: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.returned = self.span.forward(args, kwargs)
        return self.returned


class _Follower(nn.Module):
    """At the place of another layer of the range: passes on what the first has returned."""

    def __init__(self, head: _Head) -> None:
        super().__init__()
        object.__setattr__(self, "head", head)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.head.returned
