"""How blocks of a KV cache on a GPU become the runs of bytes that copies move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from banaserve.kernels.packed_pages import PackedPages, is_one_run

Addresses = npt.NDArray[np.int64]
CopyPages = Callable[[Addresses, Addresses], None]
"""``(targets, sources)``: queues the copy of one page for each pair."""


class GpuPages(Protocol):
    """Queues the copies of one layer's blocks, on the current stream.

    Loads are queued on one stream and saves on one, by one thread at a time each.
    """

    def load(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        """Copy the pages at ``host`` into ``blocks``."""
        ...

    def save(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        """Copy ``blocks`` to the pages at ``host``."""
        ...


def gpu_pages(layers: Sequence[torch.Tensor], page_bytes: int) -> GpuPages:
    """For layers of equal shape and strides, whose first dimension is the blocks.

    Raises:
        ValueError: A block has other than ``page_bytes``, or lies in several runs that are not the
            heads of vLLM's layouts.
    """
    block_bytes = layers[0].shape[1:].numel() * layers[0].element_size()
    if page_bytes != block_bytes:
        raise ValueError(f"page_bytes: {page_bytes}; allowed: {block_bytes}, as a block has")
    return _WholeBlocks(layers) if is_one_run(layers[0]) else _PackedBlocks(PackedPages(layers))


class _WholeBlocks:
    """Each block is a run of bytes where it lies."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)  # their memory has to outlive the addresses
        self._bases = [tensor.data_ptr() for tensor in layers]
        self._block_bytes = layers[0].stride()[0] * layers[0].element_size()

    def load(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        copy(self._addresses(layer, blocks), host)

    def save(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        copy(host, self._addresses(layer, blocks))

    def _addresses(self, layer: int, blocks: Sequence[int]) -> Addresses:
        return np.asarray(blocks, dtype=np.int64) * self._block_bytes + self._bases[layer]


class _PackedBlocks:
    """Blocks with their heads apart are packed on the GPU, so that one run a page crosses the bus.

    What one stream has queued runs in order, so each piece finds the stage free.
    """

    def __init__(self, packed: PackedPages) -> None:
        self._packed = packed
        self._load_stage, self._save_stage = packed.stage(), packed.stage()

    def load(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        for part, room in self._pieces(len(blocks), self._load_stage):
            copy(room, host[part])
            self._packed.unpack(layer, blocks[part], self._load_stage)

    def save(self, layer: int, blocks: Sequence[int], host: Addresses, copy: CopyPages) -> None:
        for part, room in self._pieces(len(blocks), self._save_stage):
            self._packed.pack(layer, blocks[part], self._save_stage)
            copy(host[part], room)

    def _pieces(self, count: int, stage: torch.Tensor) -> Iterator[tuple[slice, Addresses]]:
        """As many blocks at a time as the stage has pages, and the addresses of those pages."""
        num_pages, page_bytes = stage.shape
        pages = np.arange(num_pages, dtype=np.int64) * page_bytes + stage.data_ptr()
        for first in range(0, count, num_pages):
            part = slice(first, min(first + num_pages, count))
            yield part, pages[: part.stop - part.start]
