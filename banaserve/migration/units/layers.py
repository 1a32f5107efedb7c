"""Layer ranges: layers run in a guest with weights and KV; proxies replace them in the model."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.base.types import Module
from banaserve.contracts.migration_api import MoveLayers
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.kv.slot_writer import SlotWriter
from banaserve.migration.kv.step_context import StepContext, common_from
from banaserve.migration.modules.layer_proxy import Around, RemoteRange
from banaserve.migration.modules.partial_model import PartialModel
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.messages import SlotCopies, StorePlace
from banaserve.migration.rpc.tensors import TensorBundle, restore, to_device
from banaserve.migration.units.base import LayerSpan, MigrationUnit
from banaserve.migration.units.guest_unit import Answer, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit, UnitLocation
from banaserve.migration.units.kind import UnitKind
from banaserve.transport.interface import Tensor, Transport


class LayerRange(LayerSpan, frozen=True, tag="layers"):
    """Decoder layers ``start`` to ``end - 1``: weights and KV cache."""

    kind: ClassVar[str] = "layers"
    has_weights: ClassVar[bool] = True
    loads_weights: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"layers {self.start}:{self.end}"

    def check(self, shape: ModelGeometry) -> None:
        if not 0 <= self.start < self.end <= shape.num_layers:
            raise MigrationError(
                f"{self} is empty or outside of 0:{shape.num_layers}: "
                f"name a range START:END within it"
            )
        if self.end - self.start == shape.num_layers:
            raise MigrationError("every layer would leave: keep at least one on the host")

    def covers(self, other: MigrationUnit) -> bool:
        """Return whether all layers of ``other``, of any kind, are in this range."""
        return set(other.layers) <= set(self.layers)

    def move_request(self, source: str, target: str) -> MoveLayers:
        return MoveLayers(source, target, (self.start, self.end))

    def as_modules(self) -> list[Module]:
        return [Module(self.start, self.end)]

    def modelled(self, own: ModelGeometry, model: ModelGeometry) -> list[Module]:
        start, end = (n * model.num_layers // own.num_layers for n in (self.start, self.end))
        return [Module(start, end)]


class BuildLayers(messages.Build, frozen=True, tag=True):
    """Request to build layers ``start`` to ``end - 1`` of the list ``path`` from the checkpoint.

    Attributes:
        path: Path of the model's list of layers in the model.
        store: Store that the guest may save blocks to itself; None if it may not.
    """

    path: str
    start: int
    end: int
    store: StorePlace | None = None

    @property
    def loads_weights(self) -> bool:
        return True


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


# ---- on the host


class HostLayers(HostUnit):
    """A range of layers of this engine's model."""

    replaces_modules = True

    def __init__(self, unit_id: str, modules: LayerRange, *, engine: HostEngine) -> None:
        super().__init__(unit_id, modules, engine)
        self._start, self._end = modules.start, modules.end
        self._proxies: RemoteRange | None = None

    def build_request(self) -> BuildLayers:
        engine = self._engine
        return BuildLayers(
            self.unit_id,
            engine.kv_shape,
            engine.kv.num_blocks,
            engine.path,
            self._start,
            self._end,
            engine.store,
        )

    def install(self) -> None:
        residence, proxies, engine = self.residence, self._proxies, self._engine
        if residence is None:
            assert proxies is not None
            proxies.swap_in()
            self._proxies = None
            return

        def lost(error: GuestLostError) -> None:
            engine.on_lost(residence.link, error)

        where = RemoteLayers(residence, engine.step_context, engine.ranks)
        if proxies is not None:
            proxies.redirect(where, lost)
            return
        self._proxies = RemoteRange(engine.layers, self._start, self._end, self.names, where, lost)
        self._proxies.swap_out()


class RemoteLayers:
    """Steps of a range of layers in one guest; see ``LayerChannel``."""

    def __init__(self, residence: UnitLocation, step_context: StepContext, ranks: Ranks) -> None:
        self._residence = residence
        self._step_context = step_context
        self._ranks = ranks

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    @property
    def can_save(self) -> bool:
        """Return whether the guest can save blocks of the layers to the store."""
        return self._residence.saves and self.link.can_be_ended

    def run(
        self, arguments: Mapping[str, Any], saves: SlotCopies | None = None
    ) -> Sequence[torch.Tensor | None]:
        """Run one step in the guest and return its values, without rows for padding.

        Raises:
            GuestLostError: The guest is lost.
        """
        return self._ranks.step(lambda: self._run(arguments, saves), self.link.give_up)

    def _run(
        self, arguments: Mapping[str, Any], saves: SlotCopies | None
    ) -> Sequence[torch.Tensor | None]:
        num_tokens = self._step_context.num_tokens
        arguments = without_padding(arguments, num_tokens)
        request, bundle = self._message(arguments, 0, saves)
        returned = self.link.run(request, bundle, num_tokens)
        return self._checked(returned, arguments["hidden_states"])

    def submit(
        self, arguments: Mapping[str, Any], num_follow: int, saves: SlotCopies | None = None
    ) -> None:
        """Send a part of a step without waiting.

        Raises:
            GuestLostError: The guest is lost.
        """
        self.link.submit(*self._message(arguments, num_follow, saves))

    def collect(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Return the values for the part submitted first, whose input is ``hidden_states``.

        Raises:
            GuestLostError: The guest is lost.
        """
        return self._checked(self.link.collect(hidden_states.shape[0]), hidden_states)

    def _message(
        self, arguments: Mapping[str, Any], num_follow: int, saves: SlotCopies | None
    ) -> tuple[RunLayers, TensorBundle]:
        bundle = self.link.bundle()
        request = RunLayers(
            self._residence.unit_id,
            self._residence.working_epoch,
            bundle.put_all(self._step_context.fields()),
            bundle.put_all(arguments),
            num_follow,
            saves,
        )
        return request, bundle

    def _checked(
        self, returned: Sequence[torch.Tensor | None], hidden_states: torch.Tensor
    ) -> Sequence[torch.Tensor | None]:
        for number, tensor in enumerate(returned or [None]):
            if tensor is not None or not number:
                self.link.check_shape(tensor, hidden_states)
        device = hidden_states.device
        return [None if tensor is None else to_device(tensor, device) for tensor in returned]


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


# ---- in the guest


class GuestLayers(GuestUnit):
    """A unit of layers in a guest, with weights and KV."""

    serves = RunLayers

    def __init__(
        self, config: VllmConfig, transport: Transport, request: BuildLayers, epoch: int
    ) -> None:
        super().__init__(config, transport)
        self._model = PartialModel(
            config, request.path, request.start, request.end, self._device, self._kernels
        )
        self.weight_bytes = self._model.weight_bytes
        heads = dict.fromkeys(self._model.attentions, request.kv.block_shape[0])
        self._model.bind(self._offer(request, heads, epoch))
        if request.store is not None and self._landing is None:
            places = dict(enumerate(self.places.values(), start=request.start))
            assert self._region is not None
            self.slots = SlotWriter.open(request.store, self._region.memory, places)

    def serve(
        self, request: RunLayers, tensors: Sequence[Tensor], services: GuestServices
    ) -> Answer:
        began_s = time.perf_counter()
        services.expect(request.num_follow)
        common = common_from(restore(request.step, tensors, self._device))
        arguments = restore(request.arguments, tensors, self._device)
        returned = self._model.run(common, arguments, services.computing)
        values = returned if isinstance(returned, tuple) else (returned,)
        bundle = services.bundle()
        indices = tuple(None if value is None else bundle.put(value) for value in values)
        seconds = time.perf_counter() - began_s
        save_s = self._save(request.saves, services.computing)
        is_tuple = isinstance(returned, tuple)
        return messages.StepOutputs(is_tuple, indices, seconds, save_s), bundle

    def _save(self, copies: SlotCopies | None, around: Around) -> float | None:
        """Copy blocks to the host's store; return the seconds, or None if not copied."""
        began_s = time.perf_counter()
        if copies is None or self.slots is None or not self.slots.write(copies, around):
            return None
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._model.close()
        if self.slots is not None:
            self.slots.close()
        self.slots = None
        super().close()


KIND = UnitKind(
    unit=LayerRange,
    request=MoveLayers,
    asked=lambda ask: LayerRange(*ask.layers),
    asked_home=lambda ask: LayerRange(*ask.layers) if ask.layers is not None else None,
    of_module=lambda one: None if one.heads else LayerRange(one.first_layer, one.end_layer),
    build=BuildLayers,
    run=RunLayers,
    host_units=lambda engine: functools.partial(HostLayers, engine=engine),
    guest_units=lambda config, transport: functools.partial(GuestLayers, config, transport),
)
