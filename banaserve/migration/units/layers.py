"""Layer ranges: layers run in a guest with weights and KV; proxies replace them in the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from banaserve.base.errors import MigrationError
from banaserve.base.types import Module
from banaserve.contracts.migration_api import MoveLayers
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.kv.slot_writer import SlotWriter
from banaserve.migration.kv.step_context import common_from
from banaserve.migration.modules.layer_proxy import Around, RemoteLayers, RunLayers
from banaserve.migration.modules.partial_model import PartialModel
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import Build, SlotCopies
from banaserve.migration.rpc.tensors import restore
from banaserve.migration.units.base import LayerSpan, MigrationUnit
from banaserve.migration.units.guest_unit import Answer, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostUnit
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


# ---- on the host


class HostLayers(HostUnit):
    """A range of layers of this engine's model."""

    replaces_modules = True
    _remote: RemoteLayers | None = None

    def install(self) -> None:
        engine = self._engine
        if self._remote is None:
            place = engine.layers, self.modules.layers, self.names
            context = engine.step_context, engine.ranks, engine.on_lost
            self._remote = RemoteLayers(*place, *context)
        self._remote.arrange(self.residence)
        if self.residence is None:
            self._remote = None  # next time other modules may be in the model's list


# ---- in the guest


class GuestLayers(GuestUnit):
    """A unit of layers in a guest, with weights and KV."""

    serves = RunLayers

    def __init__(
        self, config: VllmConfig, transport: Transport, request: Build[LayerRange], epoch: int
    ) -> None:
        super().__init__(config, transport)
        layers = request.modules
        self._model = PartialModel(
            config, request.path, layers.start, layers.end, self._device, self._kernels
        )
        self.weight_bytes = self._model.weight_bytes
        heads = dict.fromkeys(self._model.attentions, request.kv.block_shape[0])
        self._model.bind(self._offer(request, heads, epoch))
        if request.store is not None and self._landing is None:
            places = dict(enumerate(self.places.values(), start=layers.start))
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
        return messages.StepOutputs(indices, seconds, save_s), bundle

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
    run=RunLayers,
    host=HostLayers,
    guest=GuestLayers,
)
