"""The host's KV cache: a slab for each layer, so that what moves away is really freed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from banaserve.engine.vllm.migration.gpu_slab import GpuSlab
from banaserve.engine.vllm.migration.messages import KvShape
from banaserve.engine.vllm.migration.slab import Slab
from banaserve.transport.memory import Memory


class Run(NamedTuple):
    """Bytes of a layer's page that lie together: the whole page, or some neighbouring heads.

    Attributes:
        in_page: Offset in the page as the host lays it out.
        num_bytes: Of the run.
    """

    in_page: int
    num_bytes: int


class Freed(NamedTuple):
    """What giving memory back has brought.

    Attributes:
        predicted_bytes: What moved away of the pool that the engine started with.
        freed_bytes: Really given back, as the kernel counts.
    """

    predicted_bytes: int
    freed_bytes: int


class HostKv:
    """Every layer's KV in address space of its own, with room for ``growth`` times the blocks.

    Attributes:
        tensors: ``[max_blocks, heads, ...]`` by the name of the attention, in layer order.
        num_blocks: Of the pool when the engine started.
        max_blocks: Room that is reserved.
        page_bytes: Of one block of one layer.
        head_bytes: Of one KV head in it.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], growth: float) -> None:
        first = next(iter(kv_caches.values()))
        self.num_blocks = int(first.shape[0])
        self.max_blocks = max(self.num_blocks, int(self.num_blocks * growth))
        self.num_heads = int(first.shape[1])
        self.page_bytes = first[0].numel() * first.element_size()
        self.head_bytes = self.page_bytes // self.num_heads
        self.block_shape = tuple(first.shape[1:])
        self.dtype = first.dtype
        shape = (self.max_blocks, *self.block_shape)
        slab_bytes = self.max_blocks * self.page_bytes
        self._slabs = {name: make_slab(slab_bytes, first.device) for name in kv_caches}
        self.tensors = {name: slab.tensor(shape, self.dtype) for name, slab in self._slabs.items()}
        for slab in self._slabs.values():
            slab.populate(self.num_blocks * self.page_bytes)

    def shape(self, layout: str, block_size_tokens: int) -> KvShape:
        """For a guest, which lays its own out alike."""
        dtype = str(self.dtype).removeprefix("torch.")
        return KvShape(self.max_blocks, self.block_shape, dtype, layout, block_size_tokens)

    def memory(self, name: str) -> Memory:
        slab = self._slabs[name]
        return Memory(slab.address, slab.num_bytes, True, slab)

    def runs(self, heads: Sequence[int] | None) -> list[Run]:
        """The page of a layer, or the runs of neighbouring heads in it."""
        if heads is None:
            return [Run(0, self.page_bytes)]
        return [
            Run(first * self.head_bytes, count * self.head_bytes) for first, count in spans(heads)
        ]

    def free(
        self, name: str, heads: Sequence[int] | None, blocks: Sequence[int] | None = None
    ) -> Freed:
        """Give the memory of a layer, or of some of its heads or blocks, back to the system."""
        slab = self._slabs[name]
        ranges = [
            (block * self.page_bytes + run.in_page, run.num_bytes)
            for block in (range(self.max_blocks) if blocks is None else blocks)
            for run in self.runs(heads)
        ]
        num_blocks = self.num_blocks if blocks is None else len(blocks)
        predicted = num_blocks * sum(run.num_bytes for run in self.runs(heads))
        return Freed(predicted, slab.give_back(ranges))

    def poison(self, name: str, heads: Sequence[int] | None, blocks: Iterable[int]) -> None:
        """Overwrite blocks that have moved away with NaN: a stale read shows at once."""
        which = torch.tensor(sorted(blocks), dtype=torch.int64)
        for head in range(self.num_heads) if heads is None else heads:
            self.tensors[name][which, head] = float("nan")

    def heal(self, name: str, heads: Sequence[int] | None) -> None:
        """Take the poison out again: attention multiplies what no token has written by zero."""
        for head in range(self.num_heads) if heads is None else heads:
            self.tensors[name][: self.num_blocks, head] = 0

    def heal_blocks(self, name: str, blocks: npt.NDArray[np.int64]) -> None:
        """The same for single blocks of a layer."""
        self.tensors[name][torch.from_numpy(blocks)] = 0

    def populate(self, name: str, num_blocks: int) -> None:
        """Back the first blocks of a layer with memory before it comes home."""
        self._slabs[name].populate(num_blocks * self.page_bytes)

    @property
    def resident_bytes(self) -> int:
        return sum(slab.resident_bytes() for slab in self._slabs.values())


def make_slab(num_bytes: int, device: torch.device) -> Slab | GpuSlab:
    """A slab in the memory of ``device``."""
    return Slab(num_bytes) if device.type == "cpu" else GpuSlab(num_bytes, device)


def spans(heads: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours joined: ``(first, count)``, ascending."""
    found: list[tuple[int, int]] = []
    for head in sorted(heads):
        if found and sum(found[-1]) == head:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((head, 1))
    return found


def blocks_gained(num_blocks: int, max_blocks: int, away_bytes: int, kept_bytes: int) -> int:
    """Blocks by which the pool can grow when every layer that stays has to grow.

    Args:
        num_blocks: Of the pool when nothing is away.
        max_blocks: Room that is reserved.
        away_bytes: Of one block, what lies elsewhere.
        kept_bytes: Of one block, what lies here.

    Returns:
        Whole blocks that fit into what is away, within the room.
    """
    if not kept_bytes:
        return max_blocks - num_blocks
    return min(num_blocks * away_bytes // kept_bytes, max_blocks - num_blocks)
