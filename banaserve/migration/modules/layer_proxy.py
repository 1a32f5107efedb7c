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
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.split_attention import OnLost
from banaserve.migration.modules.step_graphs import call_in_break
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.messages import SlotCopies
from banaserve.migration.rpc.tensors import to_device

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


class RunLayers(messages.Run, frozen=True, tag=True):
    """Request for one step of a range of layers.

    Attributes:
        step: Attention metadata by field: a plain value, or a list that begins with the index of
            a tensor.
        arguments: Arguments of the first layer by parameter name, encoded like ``step``.
        num_follow: Number of messages that the host sends next without waiting for this answer.
        saves: Blocks to copy to the store before the answer, as they are after the step.
    """

    step: dict[str, Any]
    arguments: dict[str, Any]
    num_follow: int = 0
    saves: SlotCopies | None = None

    @property
    def writes_store(self) -> bool:
        return self.saves is not None


class RemoteLayers:
    """A range of the model's layers in a guest: proxies in the model's list, and the steps there.

    ``run``, ``submit`` and ``collect`` raise ``GuestLostError`` if the guest is lost.

    Args:
        layers: The model's list of layers.
        span: Indices of the range in that list, ascending.
        names: Names of the range's attentions, for which the store's hooks are called.
        on_lost: Called once when the guest is lost in the middle of a step.

    Attributes:
        signature: Signature of the first layer.
    """

    def __init__(
        self,
        layers: nn.ModuleList,
        span: Sequence[int],
        names: Sequence[str],
        step_context: StepContext,
        ranks: Ranks,
        on_lost: OnLost,
    ) -> None:
        self._layers = layers
        self._span = span
        self._names = names
        self._own = [layers[i] for i in self._span]
        self._step_context = step_context
        self._ranks = ranks
        self._on_lost = on_lost
        self._residence: UnitLocation | None = None
        self.signature = inspect.signature(self._own[0].forward)
        self._returns_residual = "residual" in self.signature.parameters

    def __len__(self) -> int:
        return len(self._span)

    @property
    def link(self) -> GuestClient:
        """Client of the guest that has the layers now, or had them last."""
        return self._place.link

    @property
    def _place(self) -> UnitLocation:
        assert self._residence is not None
        return self._residence

    # ---- between two steps, and when the guest is lost in one

    def arrange(self, residence: UnitLocation | None) -> None:
        """Run the layers in a guest from now on; None: put them back, for good.

        A step under way ends with the values of the proxies.
        """
        if residence is None:
            for index, layer in zip(self._span, self._own, strict=True):
                self._layers[index] = layer
            return
        is_away = self._residence is not None
        self._residence = residence
        if is_away:
            return  # the same proxies ask the next guest
        first = RangeProxy(self)
        self._layers[self._span[0]] = first
        for index in self._span[1:]:
            self._layers[index] = _Follower(first)

    def lost(self, error: GuestLostError) -> None:
        """Report that the guest is lost in the middle of a step."""
        self._on_lost(self.link, error)

    # ---- in a step

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the range's part of one step; zeros if the guest is lost or there is no batch."""
        return call_in_break(self._run, self.zeros, by_name(self.signature, args, kwargs))

    def _run(self, arguments: Mapping[str, Any]) -> Any:
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return self.zeros(arguments)
        try:
            self.wait_for_loads()
            returned = self.run(arguments, self.slots_to_fill())
        except GuestLostError as lost:
            self.lost(lost)
            return self.zeros(arguments)
        self.save(metadata)
        return returned

    def run(self, arguments: Mapping[str, Any], saves: SlotCopies | None = None) -> Any:
        """Run one step in the guest and return the last layer's values, without padding's rows.

        Args:
            arguments: Arguments of the first layer, by parameter name.
            saves: Blocks for the guest to copy to the store; ``link.save_s`` is None if it did not.
        """

        def work() -> Any:
            mine = without_padding(arguments, self._step_context.num_tokens)
            self.submit(mine, 0, saves)
            return self.collect(mine["hidden_states"])

        return self._ranks.step(work, self.link.give_up)

    # ---- single actions of a step in parts

    def wait_for_loads(self) -> None:
        """Wait until the blocks that the range reads have been fetched."""
        store_copier.wait_for_loads(self._names)

    def slots_to_fill(self) -> SlotCopies | None:
        """Return the blocks of this step that the guest is to save; None if it is to save none."""
        can_save = self._place.saves and self.link.can_be_ended
        return store_copier.slots_to_fill() if can_save else None

    def submit(
        self, arguments: Mapping[str, Any], num_follow: int, saves: SlotCopies | None = None
    ) -> None:
        """Send a part of a step without waiting.

        Args:
            num_follow: Number of parts that are submitted before any other request to this guest.
            saves: Blocks of the whole step, given with its last part; see ``run``.
        """
        bundle = self.link.bundle()
        request = RunLayers(
            self._place.unit_id,
            self._place.working_epoch,
            bundle.put_all(self._step_context.fields()),
            bundle.put_all(arguments),
            num_follow,
            saves,
        )
        self.link.submit(request, bundle)

    def collect(self, hidden_states: torch.Tensor) -> Any:
        """Return the last layer's values for the part submitted first, given its input."""
        returned = self.link.collect(hidden_states.shape[0])
        for number, tensor in enumerate(returned or [None]):
            if tensor is not None or not number:
                self.link.check_shape(tensor, hidden_states)
        device = hidden_states.device
        values = [None if tensor is None else to_device(tensor, device) for tensor in returned]
        return tuple(values) if self._returns_residual else values[0]

    def save(self, metadata: Any) -> None:
        """Report that the range's blocks of this step may be saved, or that the guest did it."""
        save_s = self.link.save_s
        if save_s is None:
            store_copier.save_layers(self._names, metadata)
        else:
            store_copier.saved_elsewhere(self._names, save_s)

    def zeros(self, arguments: Mapping[str, Any]) -> Any:
        """Return zeros with which a step goes on whose output will be dropped."""
        zeros = torch.zeros_like(arguments["hidden_states"])
        return (zeros, zeros.clone()) if self._returns_residual else zeros


def without_padding(arguments: Mapping[str, Any], num_tokens: int) -> Mapping[str, Any]:
    """Return the arguments of a layer with the rows of the batch's tokens alone.

    A CUDA graph has more rows than the batch for which it is replayed.
    """
    num_rows = len(arguments["hidden_states"])
    if num_rows == num_tokens:
        return arguments
    return {name: _cut(value, num_rows, num_tokens) for name, value in arguments.items()}


def _cut(value: Any, num_rows: int, num_tokens: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    # Positions may have several rows for each token, and then the tokens come last.
    dim = 0 if value.is_floating_point() else -1
    return value.narrow(dim, 0, num_tokens) if value.shape[dim] == num_rows else value


class RangeProxy(nn.Module):
    """Proxy in the place of the first layer, which runs the whole range."""

    span: RemoteLayers

    def __init__(self, span: RemoteLayers) -> None:
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
