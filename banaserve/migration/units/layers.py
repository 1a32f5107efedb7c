"""Layer ranges: layers run in a guest with weights and KV; proxies replace them in the model."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import ClassVar

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.base.types import Module
from banaserve.contracts.migration_api import MoveLayers
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.kv.slot_writer import SlotWriter
from banaserve.migration.kv.step_context import common_from
from banaserve.migration.modules.layer_proxy import Around, RemoteRange
from banaserve.migration.modules.partial_model import PartialModel
from banaserve.migration.modules.remote_layers import RemoteLayers, RunLayers
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import SlotCopies, StorePlace
from banaserve.migration.rpc.tensors import restore
from banaserve.migration.units.base import LayerSpan, MigrationUnit
from banaserve.migration.units.guest_unit import Answer, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
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
    build=BuildLayers,
    run=RunLayers,
    host_units=lambda engine: functools.partial(HostLayers, engine=engine),
    guest_units=lambda config, transport: functools.partial(GuestLayers, config, transport),
)
