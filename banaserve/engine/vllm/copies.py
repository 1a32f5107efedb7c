"""Byte copies between the engine's KV blocks and the store's slots, for host and GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

import banaserve._native as _native
from banaserve.kvstore.pool import PoolView


class BlockCopier(Protocol):
    """Copies whole pages of one layer; called from copy threads, not from the forward pass."""

    def mark(self) -> Any:
        """A point in the engine's work that later copies must wait for; from its thread."""
        ...

    def load(
        self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int]
    ) -> None: ...

    def save(
        self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int], after: Any
    ) -> None: ...


def make_copier(layers: Sequence[torch.Tensor], page_bytes: int, part: int) -> BlockCopier:
    """A copier for the device that the KV cache lies on.

    Args:
        layers: One tensor a layer, its first dimension the blocks, each block one run of
            ``page_bytes`` bytes.
        part: This worker's tensor-parallel rank: which part of a slot is its own.

    Raises:
        ValueError: A layer's blocks are not contiguous runs of ``page_bytes``.
    """
    for tensor in layers:
        stride_bytes = tensor.stride(0) * tensor.element_size()
        block_bytes = tensor[0].numel() * tensor.element_size()
        if stride_bytes != page_bytes or block_bytes != page_bytes:
            raise ValueError(
                f"KV cache layout {tuple(tensor.shape)} strides {tensor.stride()} does not keep "
                f"a block in one run of {page_bytes} bytes"
            )
    if layers[0].device.type == "cpu":
        return HostCopier(layers, page_bytes, part)
    return GpuCopier(layers, page_bytes, part)


class HostCopier:
    """KV cache in process memory: native copies that let go of the GIL."""

    def __init__(self, layers: Sequence[torch.Tensor], page_bytes: int, part: int) -> None:
        self._layers = list(layers)
        self._bases = [tensor.data_ptr() for tensor in layers]
        self._cache_bytes = layers[0].shape[0] * page_bytes
        self._page_bytes = page_bytes
        self._part = part

    def mark(self) -> None:
        return None

    def load(self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int]) -> None:
        _native.copy_regions(
            self._bases[layer],
            view.base_address,
            self._block_offsets(blocks),
            self._slot_offsets(layer, view, slots),
            self._page_bytes,
            self._cache_bytes,
            view.memory.size,
        )

    def save(
        self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int], after: None
    ) -> None:
        _native.copy_regions(
            view.base_address,
            self._bases[layer],
            self._slot_offsets(layer, view, slots),
            self._block_offsets(blocks),
            self._page_bytes,
            view.memory.size,
            self._cache_bytes,
        )

    def _block_offsets(self, blocks: Sequence[int]) -> np.ndarray:
        return np.asarray(blocks, dtype=np.int64) * self._page_bytes

    def _slot_offsets(self, layer: int, view: PoolView, slots: Sequence[int]) -> np.ndarray:
        inside = view.fingerprint.offset_bytes(layer, self._part)
        return np.asarray(slots, dtype=np.int64) * view.slot_bytes + inside


class GpuCopier:
    """KV cache on a GPU: copies on a stream of their own, ordered behind the engine's work."""

    def __init__(self, layers: Sequence[torch.Tensor], page_bytes: int, part: int) -> None:
        self._pages = [
            torch.as_strided(t, (t.shape[0], page_bytes // t.element_size()), (t.stride(0), 1))
            for t in layers
        ]
        self._page_bytes = page_bytes
        self._part = part
        self._stream = torch.cuda.Stream()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def load(self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            for block, slot in zip(blocks, slots, strict=True):
                self._pages[layer][block].copy_(self._host(layer, view, slot), non_blocking=True)
        self._stream.synchronize()

    def save(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: torch.cuda.Event,
    ) -> None:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for block, slot in zip(blocks, slots, strict=True):
                self._host(layer, view, slot).copy_(self._pages[layer][block], non_blocking=True)
        self._stream.synchronize()

    def _host(self, layer: int, view: PoolView, slot: int) -> torch.Tensor:
        start = slot * view.slot_bytes + view.fingerprint.offset_bytes(layer, self._part)
        raw = torch.from_numpy(view.memory[start : start + self._page_bytes])
        return raw.view(self._pages[layer].dtype)
