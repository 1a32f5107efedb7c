"""Head sets: attention of some KV heads of a layer runs in a guest, that of the others here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from banaserve.base.types import Module
from banaserve.contracts.migration_api import MoveHeads, Return
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.attention import CommonAttentionMetadata
from banaserve.migration import checks
from banaserve.migration.kv.step_context import common_from
from banaserve.migration.modules.head_attention import HeadAttention, head_attention
from banaserve.migration.modules.head_split import SplitHeads
from banaserve.migration.modules.split_attention import RemoteAttention, RunAttention
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import Build
from banaserve.migration.rpc.tensors import from_wire, restore, to_device
from banaserve.migration.units.base import LayerNumbers
from banaserve.migration.units.guest_unit import Answer, DescribedStep, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.kind import UnitKind
from banaserve.transport.interface import Tensor, Transport


class HeadSet(LayerNumbers, frozen=True, tag="heads"):
    """KV heads by layer, each with the query heads of its group: KV cache only."""

    kind: ClassVar[str] = "heads"
    one: ClassVar[str] = "head"
    in_full: ClassVar[str] = "KV head"
    is_on_all_ranks: ClassVar[bool] = False

    heads: dict[int, tuple[int, ...]]

    def check(self, shape: ModelGeometry) -> None:
        self.check_numbers(shape.num_layers, shape.num_kv_heads)

    def kv_pages(self, num_kv_heads: int) -> float:
        return sum(len(heads) for heads in self.heads.values()) / num_kv_heads

    def move_request(self, source: str, target: str) -> MoveHeads:
        return MoveHeads(source, target, self.heads)

    def return_request(self, source: str) -> Return:
        return Return(source, heads=self.heads)

    def as_modules(self) -> list[Module]:
        """Return one module for each run of neighbouring layers with equal heads."""
        found: list[Module] = []
        for layer in self.layers:
            heads = tuple(sorted(self.heads[layer]))
            last = found[-1] if found else None
            if last is not None and (last.end_layer, last.heads) == (layer, heads):
                found[-1] = Module(last.first_layer, layer + 1, heads)
            else:
                found.append(Module(layer, layer + 1, heads))
        return found

    def modelled(self, own: ModelGeometry, model: ModelGeometry) -> list[Module]:
        def layer(index: int) -> int:
            return index * model.num_layers // own.num_layers

        found = []
        for index in self.layers:
            taken: list[int] = []
            for head in sorted(self.heads[index]):
                first, end = (n * model.num_kv_heads // own.num_kv_heads for n in (head, head + 1))
                taken += range(first, end)
            found.append(Module(layer(index), layer(index + 1), tuple(taken)))
        return found

    def check_attention(self, attention: Any, name: str) -> None:
        """Refuse an attention whose heads are not alike."""
        checks.check_heads(attention, name)


def _of_module(module: Module) -> HeadSet | None:
    layers = range(module.first_layer, module.end_layer)
    return HeadSet(dict.fromkeys(layers, module.heads)) if module.heads else None


# ---- on the host


class HostHeads(HostUnit):
    """KV heads of some of this engine's layers."""

    sends_slices = True

    def __init__(self, unit_id: str, modules: HeadSet, engine: HostEngine) -> None:
        super().__init__(unit_id, modules, engine)
        heads = (tuple(sorted(modules.heads[layer])) for layer in modules.layers)
        self._heads = dict(zip(self.names, heads, strict=True))

    def heads(self, name: str) -> tuple[int, ...]:
        """Return the unit's KV heads of an attention, ascending."""
        return self._heads[name]

    def install(self) -> None:
        engine, where = self._engine, None
        if self.residence is not None:
            where = RemoteAttention(self.residence, engine.step_context)
        for name in self.names:
            if name not in engine.split_heads:
                arguments = engine.attentions[name], name, engine.step_context, engine.on_lost
                engine.split_heads[name] = SplitHeads(engine.config, *arguments)
            engine.split_heads[name].arrange(self.unit_id, self.heads(name), where)


# ---- in the guest


class HeadStep:
    """Metadata of one step, built once for all layers that have the same number of heads."""

    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common
        self._built: dict[int, Any] = {}

    def metadata(self, attention: HeadAttention, num_kv_heads: int) -> Any:
        if num_kv_heads not in self._built:
            self._built[num_kv_heads] = attention.metadata(self.common)
        return self._built[num_kv_heads]


class GuestHeads(GuestUnit):
    """A unit of heads in a guest: KV and attention, no weights."""

    serves = RunAttention

    def __init__(
        self, config: VllmConfig, transport: Transport, request: Build[HeadSet], epoch: int
    ) -> None:
        super().__init__(config, transport)
        heads = {part.name: part.num_kv_heads for part in request.slices}
        kv_caches = self._offer(request, heads, epoch)
        self._described: DescribedStep[HeadStep] = DescribedStep()
        self._attentions: dict[str, HeadAttention] = {
            part.name: head_attention(
                config, part, request.unit_id, kv_caches[part.name], self._kernels
            )
            for part in request.slices
        }

    def serve(
        self, request: RunAttention, tensors: Sequence[Tensor], services: GuestServices
    ) -> Answer:
        if request.step is not None:
            self._described.set(request.step_id, self.read_step(request.step, tensors))
        step = self._described.get(request.step_id)
        query, key, value = (from_wire(tensor) for tensor in tensors[:3])
        bundle = services.bundle()
        with services.computing():
            bundle.put(self.run(request.name, step, query, key, value))
        return messages.StepOutputs((0,)), bundle

    def read_step(self, step: Mapping[str, Any], tensors: Sequence[Tensor]) -> HeadStep:
        """Return the step that the host describes."""
        return HeadStep(common_from(restore(step, tensors, self._device)))

    def run(
        self, name: str, step: HeadStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of one layer's heads; query, key and value are as received."""
        query, key, value = (to_device(tensor, self._device) for tensor in (query, key, value))
        attention = self._attentions[name]
        metadata = step.metadata(attention, key.shape[1])
        return attention.run(metadata, step.common.slot_mapping, query, key, value)

    def close(self) -> None:
        for attention in self._attentions.values():
            attention.close()
        self._attentions.clear()
        super().close()


KIND = UnitKind(
    unit=HeadSet,
    request=MoveHeads,
    asked=lambda ask: HeadSet.of(ask.heads),
    asked_home=lambda ask: HeadSet.of(ask.heads) if ask.heads is not None else None,
    of_module=_of_module,
    run=RunAttention,
    host=HostHeads,
    guest=GuestHeads,
)
