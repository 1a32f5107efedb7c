"""A guest's part of attention over sequences whose older blocks it holds.

A guest's way to its host's store: blocks go from its memory to slots without the host.

What a guest holds for its host: ranges of layers, and heads of layers.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import banaserve._native as _native
from banaserve import linux
from banaserve.engine.vllm.compat.attention import CommonAttentionMetadata
from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration.guest.kv_staging import StagingBuffer, make_kv
from banaserve.engine.vllm.migration.guest.partial_model import (
    PartialModel,
    attends_with,
    device_of,
)
from banaserve.engine.vllm.migration.kv.step_context import common_from
from banaserve.engine.vllm.migration.modules.head_attention import HeadAttention, head_attention
from banaserve.engine.vllm.migration.modules.layer_proxy import Around
from banaserve.engine.vllm.migration.modules.paged_attention import Pages
from banaserve.engine.vllm.migration.rpc.messages import (
    Build,
    BuildContext,
    BuildHeads,
    BuildLayers,
    CopyPages,
    SlotCopies,
    StorePlace,
)
from banaserve.engine.vllm.migration.rpc.tensors import dtype_named, from_wire, restore, to_device
from banaserve.errors import FingerprintError, MigrationError, ProtocolError, StoreUnavailableError
from banaserve.kernels.interface import Batch, PartialAttention
from banaserve.kvstore.client import StoreClient
from banaserve.transport.interface import OfferedRegion, RegionDescriptor, Tensor, Transport
from banaserve.transport.memory import PAGE_BYTES, Memory


class OlderBlocks:
    """KV of some layers that is read and never written by a step.

    Args:
        kv_caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by attention.
        scales: Of the scores, by attention.
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
        self._step: tuple[int, Batch] | None = None

    def describe(self, step_id: int, fields: Mapping[str, Any]) -> None:
        """Take what the layers of a step have in common.

        Raises:
            ProtocolError: It is no step, or names blocks that are not here.
        """
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
        self._step = step_id, batch

    def run(self, name: str, step_id: int, query: torch.Tensor) -> PartialAttention:
        """Attention over the step's blocks, float32.

        Raises:
            ProtocolError: The step has not been described.
        """
        if self._step is None or self._step[0] != step_id:
            raise ProtocolError(f"step {step_id} has not been described")
        with torch.inference_mode():
            return self._pages.attend(
                query,
                self._kv_caches[name],
                self._step[1],
                self._scales[name],
                causal=False,
            )


logger = logging.getLogger(__name__)


class SlotWriter:
    """Copies blocks of some layers into slots that the host has reserved, and commits none.

    Args:
        client: Of the host's name.
        memory: With the KV of the layers.
        places: Where each layer's blocks begin in it, by the layer's number in the model.
    """

    def __init__(self, client: StoreClient, memory: Memory, places: Mapping[int, int]) -> None:
        self._client = client
        self._memory = memory
        self._places = dict(places)

    @classmethod
    def open(
        cls, store: StorePlace, memory: Memory, places: Mapping[int, int]
    ) -> SlotWriter | None:
        """Connect; None where the store does not answer or refuses: then the host saves."""
        client = StoreClient(store.socket, store.fingerprint, client_name=store.client_name)
        try:
            client.connect()
        except (StoreUnavailableError, FingerprintError) as reason:
            logger.warning("the host saves what lies here: %s", reason)
            client.close()
            return None
        return cls(client, memory, places)

    def write(self, copies: SlotCopies, around: Around) -> bool:
        """Copy the blocks of all layers; False where the pool is not the one that was meant.

        Args:
            around: Each layer is copied within one.

        Raises:
            ValueError: A block or a slot does not exist; some layers may have been copied.
        """
        try:
            view = self._client.view(copies.generation)
        except StoreUnavailableError:
            return False
        page_bytes = view.fingerprint.page_bytes
        slots = np.asarray(copies.slots, np.int64) * view.slot_bytes
        blocks = np.asarray(copies.blocks, np.int64) * page_bytes
        for layer, place in self._places.items():
            with around():
                _native.copy_regions(
                    view.base_address,
                    self._memory.address,
                    slots + view.fingerprint.offset_bytes(layer),
                    blocks + place,
                    page_bytes,
                    view.memory.size,
                    self._memory.num_bytes,
                    streaming=True,  # it is another process that reads the slot
                )
        return True

    def let_go_if_lost(self) -> None:
        """Unmap the pool of a store that has gone: its memory is not free before."""
        self._client.let_go_if_lost()

    def close(self) -> None:
        """Disconnect; nothing is being copied."""
        self._client.close()


_ADVANCE_TIMEOUT_S = 5.0


class _Unit:
    """One offered region with the KV of all attentions of the unit, and the epoch of its use.

    Attributes:
        places: Offset of each attention's KV in the region, by name.
        epoch: None until the host has activated the unit.
        slots: Copies blocks to the host's store; None where the host does that.
    """

    weight_bytes = 0
    slots: SlotWriter | None = None

    def __init__(self) -> None:
        self._region: OfferedRegion | None = None
        self._landing: StagingBuffer | None = None
        self.places: dict[str, int] = {}
        self.epoch: int | None = None

    def _offer(
        self,
        config: VllmConfig,
        transport: Transport,
        request: Build,
        heads: Mapping[str, int],
        epoch: int,
    ) -> dict[str, torch.Tensor]:
        """Reserve and offer the KV caches: ``[num_blocks, num_heads, ...]`` by name.

        Args:
            heads: KV heads of each attention.

        Raises:
            MigrationError: There is no memory for the blocks that are to be backed by it.
        """
        kv = request.kv
        kernels = attends_with(config)
        if kernels is not None:
            caches = make_kv(kv, heads, request.num_backed_blocks, device_of(config))
            self._landing = StagingBuffer(transport, caches, kernels, epoch)
            self._region = self._landing.region
            return caches
        dtype = dtype_named(kv.dtype)
        end = 0
        shapes: dict[str, tuple[int, ...]] = {}
        for name, num_heads in heads.items():
            shapes[name] = (kv.num_blocks, num_heads, *kv.block_shape[1:])
            self.places[name] = end
            end += -(-torch.Size(shapes[name]).numel() * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        self._region = transport.offer(end, epoch)
        raw = torch.from_numpy(self._region.memory.view())
        for name, start in self.places.items():
            block_bytes = torch.Size(shapes[name][1:]).numel() * dtype.itemsize
            self._back(start, request.num_backed_blocks * block_bytes)
        return {
            name: raw[start : start + torch.Size(shapes[name]).numel() * dtype.itemsize]
            .view(dtype)
            .view(shapes[name])
            for name, start in self.places.items()
        }

    def _back(self, first_byte: int, num_bytes: int) -> None:
        """Take pages before a step or a copy has to wait for them."""
        assert self._region is not None
        length = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        try:
            linux.madvise(
                self._region.memory.address + first_byte, length, linux.MADV_POPULATE_WRITE
            )
        except OSError as error:
            if error.errno != errno.EINVAL:  # Linux before 5.14 takes them one by one.
                self._region.close()
                raise MigrationError(f"there is no memory for its KV: {error.strerror}") from None

    @property
    def descriptor(self) -> RegionDescriptor:
        assert self._region is not None
        return self._region.descriptor

    @property
    def landing_bytes(self) -> int:
        """Of a region that only has pages on their way; 0: the region holds the KV itself."""
        return 0 if self._landing is None else self._landing.region.memory.num_bytes

    def copy_pages(self, request: CopyPages) -> None:
        """Take pages that have landed, or let pages be fetched.

        Raises:
            ProtocolError: The KV lies in the region, or the request makes no sense.
        """
        if self._landing is None:
            raise ProtocolError(f"the KV of {request.unit_id} lies in its region")
        self._landing.copy(request)

    def activate(self, epoch: int) -> None:
        """Run for messages of ``epoch`` only, and take no copies of an older one."""
        assert self._region is not None
        self._region.advance(epoch, _ADVANCE_TIMEOUT_S)
        self.epoch = epoch

    def close(self) -> None:
        """Let go of the KV."""
        if self._landing is not None:
            self._landing.close()
        elif self._region is not None:
            self._region.close()
        self._region = self._landing = None


class LayersUnit(_Unit):
    """A range of layers with weights and KV."""

    def __init__(
        self, config: VllmConfig, transport: Transport, request: BuildLayers, epoch: int
    ) -> None:
        super().__init__()
        device = self._device = device_of(config)
        kernels = attends_with(config)
        self._stage = PartialModel(
            config, request.path, request.start, request.end, device, kernels
        )
        self.weight_bytes = self._stage.weight_bytes
        heads = dict.fromkeys(self._stage.attentions, request.kv.block_shape[0])
        self._stage.bind(self._offer(config, transport, request, heads, epoch))
        if request.store is not None and self._landing is None:
            places = dict(enumerate(self.places.values(), start=request.start))
            assert self._region is not None
            self.slots = SlotWriter.open(request.store, self._region.memory, places)

    def run(
        self,
        step: Mapping[str, Any],
        arguments: Mapping[str, Any],
        tensors: Sequence[Tensor],
        around: Around,
    ) -> Any:
        common = common_from(restore(step, tensors, self._device))
        return self._stage.run(common, restore(arguments, tensors, self._device), around)

    def save(self, copies: SlotCopies | None, around: Around) -> float | None:
        """Copy blocks to the host's store; the seconds, or None where they were not copied."""
        began_s = time.perf_counter()
        if copies is None or self.slots is None or not self.slots.write(copies, around):
            return None
        return time.perf_counter() - began_s

    def close(self) -> None:
        self._stage.close()
        if self.slots is not None:
            self.slots.close()
        self.slots = None
        super().close()


class HeadsUnit(_Unit):
    """Heads of some layers: KV and attention, no weights."""

    class Step:
        """One step's metadata, built once for all layers that have as many heads."""

        def __init__(self, common: CommonAttentionMetadata) -> None:
            self.common = common
            self._built: dict[int, Any] = {}

        def metadata(self, attention: HeadAttention, num_kv_heads: int) -> Any:
            if num_kv_heads not in self._built:
                self._built[num_kv_heads] = attention.metadata(self.common)
            return self._built[num_kv_heads]

    def read_step(self, step: Mapping[str, Any], tensors: Sequence[Tensor]) -> Step:
        """What describes a step, for all units of heads in this guest."""
        return HeadsUnit.Step(common_from(restore(step, tensors, self._device)))

    def __init__(
        self, config: VllmConfig, transport: Transport, request: BuildHeads, epoch: int
    ) -> None:
        super().__init__()
        heads = {part.name: part.num_kv_heads for part in request.slices}
        kv_caches = self._offer(config, transport, request, heads, epoch)
        kernels = attends_with(config)
        self._device = device_of(config)
        self._attentions: dict[str, HeadAttention] = {
            part.name: head_attention(config, part, request.unit_id, kv_caches[part.name], kernels)
            for part in request.slices
        }

    def run(
        self, name: str, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one layer's heads; query, key and value as they came."""
        query, key, value = (to_device(tensor, self._device) for tensor in (query, key, value))
        attention = self._attentions[name]
        metadata = step.metadata(attention, key.shape[1])
        return attention.run(metadata, step.common.slot_mapping, query, key, value)

    def close(self) -> None:
        for attention in self._attentions.values():
            attention.close()
        self._attentions.clear()
        super().close()


class ContextUnit(_Unit):
    """Older blocks of some layers: KV that is read and never written by a step."""

    def __init__(
        self, config: VllmConfig, transport: Transport, request: BuildContext, epoch: int
    ) -> None:
        super().__init__()
        heads = {part.name: part.num_kv_heads for part in request.slices}
        kv_caches = self._offer(config, transport, request, heads, epoch)
        one = request.slices[0]
        first = head_attention(
            config, one, request.unit_id, kv_caches[one.name], attends_with(config)
        )
        self._device = device_of(config)
        scales = {part.name: part.scale for part in request.slices}
        self._older: OlderBlocks | None = OlderBlocks(first.pages(), kv_caches, scales)
        first.close()

    def run(
        self,
        name: str,
        step_id: int,
        step: Mapping[str, Any] | None,
        tensors: Sequence[Tensor],
    ) -> PartialAttention:
        """Attention of one layer over older blocks; ``step`` as in ``RunContext``."""
        assert self._older is not None
        if step is not None:
            self._older.describe(step_id, restore(step, tensors))
        return self._older.run(name, step_id, to_device(from_wire(tensors[0]), self._device))

    def close(self) -> None:
        self._older = None
        super().close()
