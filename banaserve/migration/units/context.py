"""Older KV blocks of some layers: a guest attends over them, the host over newer ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from banaserve.base.errors import MigrationError, ProtocolError
from banaserve.contracts.migration_api import MoveContext
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.hooks import window_tokens
from banaserve.kernels.interface import HEAD_SIZES, Batch, PartialAttention
from banaserve.migration import checks
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.migration.modules.context_split import ContextAttention, RemoteContext
from banaserve.migration.modules.head_attention import VllmHeadAttention
from banaserve.migration.modules.paged_attention import DevicePages, KvPages, Pages, kernels_of
from banaserve.migration.modules.split_attention import RunAttention
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.messages import Build
from banaserve.migration.rpc.tensors import from_wire, restore, to_device
from banaserve.migration.units.base import LayerSpan
from banaserve.migration.units.guest_unit import Answer, DescribedStep, GuestServices, GuestUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.kind import UnitKind
from banaserve.transport.interface import Tensor, Transport


class Context(LayerSpan, frozen=True, tag="context"):
    """Older KV blocks of layers ``start`` to ``end - 1``: those that are full when they move."""

    kind: ClassVar[str] = "context"

    def __str__(self) -> str:
        return f"older blocks of layers {self.start}:{self.end}"

    def check(self, shape: ModelGeometry) -> None:
        if not 0 <= self.start < self.end <= shape.num_layers:
            raise MigrationError(
                f"{self}: name a range START:END of layers within 0:{shape.num_layers}"
            )

    def num_pages(self, num_kv_heads: int) -> float:
        """Return 0: the number of older blocks that are away varies."""
        return 0.0

    def move_request(self, source: str, target: str) -> MoveContext:
        return MoveContext(source, target, (self.start, self.end))

    def check_attention(self, attention: Any, name: str) -> None:
        """Refuse an attention that uses more than keys and queries, or has other head sizes."""
        impl = getattr(attention.impl, "inner", attention.impl)
        checks.check_heads(attention, name)
        if checks.plans_one_batch(attention):
            raise MigrationError(
                f"{name} plans one batch of a step, so its sequences cannot be split: choose "
                "another --attention-backend than FLASHINFER"
            )
        limits = (window_tokens(impl), "a sliding window"), (impl.logits_soft_cap, "a cap")
        for value, what in limits:
            if value is not None and value > 0:
                raise MigrationError(f"{name} has {what}, so its sequences cannot be split")
        if attention.head_size not in HEAD_SIZES:
            raise MigrationError(
                f"{name} has heads of size {attention.head_size}, so its sequences cannot be "
                f"split: {', '.join(map(str, HEAD_SIZES))} can"
            )


# ---- on the host


class HostContext(HostUnit):
    """Older blocks of some of this engine's layers.

    Attributes:
        away: Blocks that are in the guest. A block that is overwritten loses its NaN poison first.

    Raises:
        MigrationError: The blocks cannot be read in the layout in which they are kept.
    """

    microbatch_blocker = "older blocks of some layers are elsewhere"
    sends_slices = True
    is_backed = False  # the guest's memory is backed as copies touch it

    def __init__(self, unit_id: str, modules: Context, engine: HostEngine) -> None:
        super().__init__(unit_id, modules, engine)
        first = engine.attentions[self.names[0]]
        impl = getattr(first.impl, "inner", first.impl)
        tensor = engine.kv.tensors[self.names[0]]
        kernels = kernels_of(first.impl)
        self.pages: Pages = (
            KvPages.of(first, impl, tensor) if kernels is None else DevicePages(kernels)
        )
        self.away = RemoteBlocks(
            engine.kv.max_blocks, self._heal_blocks if engine.poisons else None
        )

    def install(self) -> None:
        engine, away = self._engine, self.away
        step_context = engine.step_context
        step_context.dirty_blocks.unfollow(away)
        remote: RemoteContext | None = None
        if self.residence is None:
            away.set(())
        else:
            step_context.dirty_blocks.follow(away)
            remote = RemoteContext(self.residence, away, step_context)
        for name in self.names:
            if name not in engine.split_contexts:
                arguments = engine.attentions[name], name, step_context, engine.on_lost
                split = ContextAttention(*arguments, self.pages, engine.ranks)
                engine.split_contexts[name] = split
            engine.split_contexts[name].arrange(remote)

    def left_home(self, dirty_blocks: DirtyBlockTracker) -> None:
        self.away.set(dirty_blocks.full())

    @property
    def single_blocks(self) -> RemoteBlocks:
        return self.away

    def _heal_blocks(self, blocks: npt.NDArray[np.int64]) -> None:
        for name in self.names:
            self._engine.kv.heal_blocks(name, blocks)


# ---- in the guest


class OlderBlocks:
    """KV of some layers that is read and never written by a step.

    Args:
        kv_caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by attention.
    """

    def __init__(
        self,
        pages: Pages,
        kv_caches: Mapping[str, torch.Tensor],
        scales: Mapping[str, float],
    ) -> None:
        self._pages = pages
        self._kv_caches = dict(kv_caches)
        self._scales = dict(scales)
        self._step: DescribedStep[Batch] = DescribedStep()

    def describe(self, step_id: int, fields: Mapping[str, Any]) -> None:
        """Set the batch that the layers of a step share; a ``ProtocolError`` if it is none here."""
        try:
            table, lengths = fields["block_table"], fields["num_tokens"]
            batch = Batch(
                block_table=table,
                query_start=fields["query_start"],
                query_position=lengths,
                range_start=torch.zeros_like(lengths),
                range_end=lengths,
            )
        except (KeyError, AttributeError, TypeError) as error:
            raise ProtocolError(f"step {step_id} is no step over older blocks: {error}") from None
        num_blocks, _, block_size, _ = next(iter(self._kv_caches.values())).shape
        room = table.shape[-1] * block_size
        if not table.numel() or not 0 <= int(table.min()) <= int(table.max()) < num_blocks:
            raise ProtocolError(f"step {step_id} names blocks that are not here")
        if len(lengths) != len(table) or int(lengths.max()) > room:
            raise ProtocolError(f"step {step_id} has more tokens than blocks")
        self._step.set(step_id, batch)

    def run(self, name: str, step_id: int, query: torch.Tensor) -> PartialAttention:
        """Return the attention over the step's blocks, float32."""
        batch, cache = self._step.get(step_id), self._kv_caches[name]
        with torch.inference_mode():
            return self._pages.attend(query, cache, batch, self._scales[name], causal=False)


class GuestContext(GuestUnit):
    """Older blocks of some layers: KV that is read and never written by a step."""

    serves = RunAttention

    def __init__(
        self, config: VllmConfig, transport: Transport, request: Build[Context], epoch: int
    ) -> None:
        super().__init__(config, transport)
        heads = {part.name: part.num_kv_heads for part in request.slices}
        kv_caches = self._offer(request, heads, epoch)
        scales = {part.name: part.scale for part in request.slices}
        pages = self._pages(request, kv_caches)
        self._older: OlderBlocks | None = OlderBlocks(pages, kv_caches, scales)

    def _pages(self, request: Build[Context], kv_caches: Mapping[str, torch.Tensor]) -> Pages:
        if self._kernels is not None:
            return DevicePages(self._kernels)
        one = request.slices[0]
        first = VllmHeadAttention(self._config, one, request.unit_id, kv_caches[one.name])
        pages = first.pages()
        first.close()
        return pages

    def serve(
        self, request: RunAttention, tensors: Sequence[Tensor], services: GuestServices
    ) -> Answer:
        with services.computing():
            part = self.run(request.name, request.step_id, request.step, tensors)
        bundle = services.bundle()
        indices = bundle.put(part.output), bundle.put(part.lse)
        return messages.StepOutputs(indices), bundle

    def run(
        self,
        name: str,
        step_id: int,
        step: Mapping[str, Any] | None,
        tensors: Sequence[Tensor],
    ) -> PartialAttention:
        """Return one layer's attention over older blocks; ``step`` as in ``RunAttention``."""
        assert self._older is not None
        if step is not None:
            self._older.describe(step_id, restore(step, tensors))
        return self._older.run(name, step_id, to_device(from_wire(tensors[0]), self._device))

    def close(self) -> None:
        self._older = None
        super().close()


KIND = UnitKind(
    unit=Context,
    request=MoveContext,
    asked=lambda ask: Context(*ask.layers),
    asked_home=lambda ask: None,
    of_module=lambda one: None,
    run=RunAttention,
    host=HostContext,
    guest=GuestContext,
)
