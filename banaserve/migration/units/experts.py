"""Expert sets: some routed experts of mixture-of-experts layers compute in a guest.

Experts have weights and no KV: nothing is copied, and a guest builds them from its own checkpoint.
The host keeps the weights of moved experts, as it keeps those of moved layers: when a guest is
lost, no weights have to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from banaserve.base.errors import MigrationError, ProtocolError
from banaserve.contracts.migration_api import MoveExperts, Return
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.experts import (
    RoutedExperts,
    experts_of,
    set_num_experts,
    split_blocker,
    weights_by_expert,
)
from banaserve.migration.kv.dirty_blocks import spans
from banaserve.migration.modules.expert_split import NOT_HERE, RemoteExperts, RunExperts, sum_of
from banaserve.migration.modules.partial_model import PartialModel
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import Build
from banaserve.migration.rpc.tensors import from_wire, to_device
from banaserve.migration.units.base import LayerNumbers
from banaserve.migration.units.guest_unit import Answer, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.kind import UnitKind
from banaserve.transport.interface import Tensor, Transport


class ExpertSet(LayerNumbers, frozen=True, tag="experts"):
    """Routed experts by layer: weights only; a guest numbers them in the order given."""

    kind: ClassVar[str] = "experts"
    one: ClassVar[str] = "expert"
    in_full: ClassVar[str] = "expert"
    loads_weights: ClassVar[bool] = True

    experts: dict[int, tuple[int, ...]]

    def check(self, shape: ModelGeometry) -> None:
        if not shape.num_experts:
            raise MigrationError("this model has no experts: move layers or heads instead")
        self.check_numbers(shape.num_layers, shape.num_experts)

    def kv_pages(self, num_kv_heads: int) -> float:
        return 0.0

    def move_request(self, source: str, target: str) -> MoveExperts:
        return MoveExperts(source, target, self.experts)

    def return_request(self, source: str) -> Return:
        return Return(source, experts=self.experts)


# ---- on the host


class HostExperts(HostUnit):
    """A unit of experts of this engine's layers."""

    microbatch_blocker = "experts of some layers are elsewhere"
    replaces_modules = True

    def __init__(self, unit_id: str, modules: ExpertSet, engine: HostEngine) -> None:
        super().__init__(unit_id, modules, engine)
        self.names = []  # no KV goes with them
        for layer in modules.layers:
            split = engine.experts.get(layer)
            if split is None:
                raise MigrationError(f"layer {layer} has no experts: its MLP is dense")
            if blocker := split_blocker(split.experts):
                raise MigrationError(f"layer {layer} cannot be split: {blocker}")
        self._experts = modules.experts

    def install(self) -> None:
        residence, engine = self.residence, self._engine
        for layer, ids in self._experts.items():
            where = None if residence is None else RemoteExperts(residence, layer)
            engine.experts[layer].arrange(self.unit_id, ids, where)


# ---- in the guest


class GuestExperts(GuestUnit):
    """A unit of experts in a guest: weights, no KV."""

    serves = RunExperts

    def __init__(
        self, config: VllmConfig, transport: Transport, request: Build[ExpertSet], epoch: int
    ) -> None:
        super().__init__(config, transport)
        self._experts: dict[int, RoutedExperts] = {}
        for first, count in spans(request.modules.layers):
            self._load(config, request, range(first, first + count))
        self._offer_nothing(epoch)

    def _load(self, config: VllmConfig, request: Build[ExpertSet], layers: range) -> None:
        """Load the experts of neighbouring layers; drop the rest of these layers once read."""
        model = PartialModel(config, request.path, layers.start, layers.stop, self._device)
        try:
            for layer, module in zip(layers, model.layers, strict=True):
                experts = experts_of(module)
                if experts is None:
                    raise MigrationError(f"layer {layer} has no experts here")
                self.weight_bytes += _keep(experts, request.modules.experts[layer])
                self._experts[layer] = experts
        finally:
            model.close()

    def serve(
        self, request: RunExperts, tensors: Sequence[Tensor], services: GuestServices
    ) -> Answer:
        experts = self._experts.get(request.layer)
        if experts is None or len(tensors) != 3:
            raise ProtocolError(f"that is no step of experts of layer {request.layer} here")
        x, weights, ids = (to_device(from_wire(tensor), self._device) for tensor in tensors)
        _check_step(x, weights, ids, int(experts.global_num_experts))
        bundle = services.bundle()
        with services.computing(), torch.inference_mode():
            bundle.put(sum_of(experts, x, weights, ids, ids != NOT_HERE))
        return messages.StepOutputs((0,)), bundle

    def close(self) -> None:
        self._experts.clear()
        super().close()


def _keep(experts: RoutedExperts, ids: Sequence[int]) -> int:
    """Keep only the experts ``ids``, numbered anew from 0; return the bytes of their weights."""
    num_bytes = 0
    for parameter in weights_by_expert(experts):
        index = torch.tensor(ids, device=parameter.device)
        # Through ``.data``: vLLM's kernel holds the parameter of the bias itself.
        parameter.data = parameter.data[index].contiguous()
        num_bytes += parameter.numel() * parameter.element_size()
    set_num_experts(experts, len(ids))
    return num_bytes


def _check_step(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, count: int) -> None:
    """Refuse tensors with which the kernels would read out of bounds.

    Raises:
        ProtocolError: Shapes or types do not fit, or an expert is not here.
    """
    if x.dim() != 2 or weights.dim() != 2 or ids.shape != weights.shape or len(ids) != len(x):
        raise ProtocolError("a step of experts has tensors of shapes that do not fit")
    if ids.dtype.is_floating_point or not weights.dtype.is_floating_point:
        raise ProtocolError("a step of experts has tensors of the wrong types")
    if ids.numel() and not NOT_HERE <= int(ids.min()) <= int(ids.max()) < count:
        raise ProtocolError("a step names an expert that is not here")


KIND = UnitKind(
    unit=ExpertSet,
    request=MoveExperts,
    asked=lambda ask: ExpertSet.of(ask.experts),
    asked_home=lambda ask: ExpertSet.of(ask.experts) if ask.experts is not None else None,
    of_module=lambda _: None,
    run=RunExperts,
    host=HostExperts,
    guest=GuestExperts,
)
