"""Byte copies between the engine's KV blocks and the store's slots, for host and GPU memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

import banaserve._native as _native
from banaserve.kvstore.pool import Numbers, PoolView


class Copy(Protocol):
    """A copy that has begun."""

    def join(self) -> None:
        """Make all work that the engine's thread queues from now on see the copied bytes."""
        ...

    def finish(self) -> float:
        """Wait until the copy has ended; return the seconds that it took."""
        ...


class BlockCopier(Protocol):
    """Copier of whole pages of one layer; called from copy threads, not from the forward pass.

    Blocks and slots are numbers, ``[num_copies]`` int64, as in ``MappedCopies``.

    Attributes:
        is_synchronous: True if the engine's work is done when its calls return. If not, a step's
            wall time says nothing about its work unless the step waits for a copy queued after it.
    """

    is_synchronous: bool

    def mark(self) -> Any:
        """Mark a point in the engine's work for copies to wait for; call in the engine's thread."""
        ...

    def load(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        """Copy slots into blocks, after the engine's work up to the mark ``after``."""
        ...

    def save(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        """Copy blocks into slots, after the engine's work up to the mark ``after``."""
        ...

    def close(self) -> None:
        """Release the pool, which a later copy takes again; no copy may be under way."""
        ...


def make_copier(
    layers: Sequence[torch.Tensor], page_bytes: int, part: int, view: PoolView | None = None
) -> BlockCopier:
    """Make a copier for the device that holds the KV cache.

    Args:
        layers: Tensors, one per layer; the first dimension is the blocks of ``page_bytes`` each. On
            a GPU in any of vLLM's layouts; otherwise contiguous, block after block.
        part: Index of this worker's run of ``page_bytes`` within a layer of a slot: its
            tensor-parallel rank, or 0 where ranks hold whole blocks.
        view: Pool that is pinned for a GPU now; None to pin it in the step of its first copy.

    Raises:
        ValueError: The blocks of a layer are laid out in another way.
    """
    if layers[0].device.type != "cpu":
        from banaserve.engine.connector.worker_side.gpu_block_copy import GpuCopier

        return GpuCopier(layers, page_bytes, part, view)
    for tensor in layers:
        stride_bytes = tensor.stride(0) * tensor.element_size()
        block_bytes = tensor[0].numel() * tensor.element_size()
        if stride_bytes != page_bytes or block_bytes != page_bytes:
            raise ValueError(
                f"KV cache layout {tuple(tensor.shape)} strides {tensor.stride()} does not keep "
                f"a block in one run of {page_bytes} bytes"
            )
    return HostCopier(layers, page_bytes, part)


@dataclass(frozen=True, slots=True)
class EndedCopy:
    """A copy that had already ended when it was returned."""

    seconds: float

    def join(self) -> None:
        return

    def finish(self) -> float:
        return self.seconds


class HostCopier:
    """Copier for a KV cache in host memory: one native call per layer, which releases the GIL."""

    is_synchronous = True

    def __init__(self, layers: Sequence[torch.Tensor], page_bytes: int, part: int) -> None:
        self._layers = list(layers)
        self._bases = [tensor.data_ptr() for tensor in layers]
        self._cache_bytes = layers[0].shape[0] * page_bytes
        self._page_bytes = page_bytes
        self._in_layer = part * page_bytes

    def mark(self) -> None:
        return None

    def load(
        self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: None
    ) -> EndedCopy:
        began_s = time.perf_counter()
        in_slot = view.fingerprint.offset_bytes(layer) + self._in_layer
        _native.copy_regions(
            self._bases[layer],
            view.base_address + in_slot,
            _offsets(blocks, self._page_bytes),
            _offsets(slots, view.slot_bytes),
            self._page_bytes,
            self._cache_bytes,
            view.memory.size - in_slot,
        )
        return EndedCopy(time.perf_counter() - began_s)

    def save(
        self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: None
    ) -> EndedCopy:
        began_s = time.perf_counter()
        in_slot = view.fingerprint.offset_bytes(layer) + self._in_layer
        _native.copy_regions(
            view.base_address + in_slot,
            self._bases[layer],
            _offsets(slots, view.slot_bytes),
            _offsets(blocks, self._page_bytes),
            self._page_bytes,
            view.memory.size - in_slot,
            self._cache_bytes,
            streaming=True,  # it is the other instance that reads the slot
        )
        return EndedCopy(time.perf_counter() - began_s)

    def close(self) -> None:
        return


def _offsets(numbers: Numbers, each_bytes: int) -> Numbers:
    return np.asarray(numbers, np.int64) * each_bytes
