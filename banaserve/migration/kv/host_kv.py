"""KV cache of a host: one slab for each layer, so that the memory of moved layers is really freed.

``DeviceKv`` copies blocks between the cache and pages in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import banaserve._native as _native
from banaserve.kernels.interface import Kernels
from banaserve.kernels.packed_pages import STAGE_BYTES, PackedPages
from banaserve.migration.kv.dirty_blocks import spans
from banaserve.migration.kv.slabs import GpuSlab, PlainSlab, Slab, has_gpu_slabs, wait_for
from banaserve.migration.rpc.messages import KvShape
from banaserve.transport.memory import Memory
from banaserve.transport.regions.offered_region import reserve


class DeviceKv:
    """Copier that packs blocks on their device: a page crosses the bus as one run of bytes.

    A page is one block of one attention: head by head, each token's key before its value. Its
    bytes are in place when a call returns. Several threads may call it.

    Args:
        caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by attention, all on one
            device.
    """

    def __init__(self, caches: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._packed = {name: PackedPages([cache], kernels) for name, cache in caches.items()}
        self._num_blocks = {name: len(cache) for name, cache in caches.items()}
        self.page_bytes = {name: packed.page_bytes for name, packed in self._packed.items()}
        self._device = next(iter(caches.values())).device
        self._lock = threading.Lock()  # of the stage
        self._stage: torch.Tensor | None = None
        if self._device.type != "cpu":
            num_bytes = max(STAGE_BYTES, *self.page_bytes.values())
            self._stage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def check(self, name: str, blocks: Sequence[int]) -> None:
        """Check that an attention and its blocks exist here.

        Raises:
            ValueError: The attention is unknown, or a block is out of range or named twice.
        """
        if name not in self._packed:
            raise ValueError(f"{name} has no KV here")
        if len(set(blocks)) != len(blocks):
            raise ValueError("a block is named twice")
        if not all(0 <= block < self._num_blocks[name] for block in blocks):
            raise ValueError(f"blocks of {name} are named that are not here")

    def pack(
        self,
        name: str,
        blocks: Sequence[int],
        pages: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy blocks to pages.

        Args:
            pages: ``[len(blocks), page_bytes]`` uint8, in host memory or on the caches' device.
            heads: Heads to copy; None for all. The bytes of other heads in the pages are undefined.
        """
        with self._lock:
            for part, room in self._pieces(name, len(blocks), pages):
                self._packed[name].pack(0, blocks[part], room, heads)
                if not self._is_direct(pages):
                    pages[part].copy_(room)
            if pages.device.type != "cpu":
                self._wait()

    def unpack(
        self,
        name: str,
        blocks: Sequence[int],
        pages: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy pages to blocks, the reverse of ``pack``; heads not named keep their values."""
        with self._lock:
            for part, room in self._pieces(name, len(blocks), pages):
                if not self._is_direct(pages):
                    room.copy_(pages[part])
                self._packed[name].unpack(0, blocks[part], room, heads)
            self._wait()

    def room(self, num_bytes: int, *, on_device: bool = False) -> torch.Tensor:
        """Return memory for pages, ``[num_bytes]`` uint8; host memory for a GPU is pinned."""
        if on_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type != "cuda":
            return torch.from_numpy(reserve(num_bytes).view())
        with torch.cuda.device(self._device):  # pinning by a thread of its own would use GPU 0
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _pieces(
        self, name: str, count: int, pages: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices of blocks that fit into the stage on the device, with that part of it."""
        if not count:
            return
        self._wait()
        if self._is_direct(pages):
            yield slice(0, count), pages
            return
        assert self._stage is not None
        size = self.page_bytes[name]
        per_time = len(self._stage) // size
        for first in range(0, count, per_time):
            part = slice(first, min(first + per_time, count))
            num_pages = part.stop - part.start
            yield part, self._stage[: num_pages * size].view(num_pages, size)

    def _is_direct(self, pages: torch.Tensor) -> bool:
        """Return whether the kernels reach the pages, so that no stage is needed."""
        return self._stage is None or pages.device.type != "cpu"

    def _wait(self) -> None:
        """Wait for the work queued by other threads and streams: it may write the same blocks."""
        if self._device.type == "cuda":
            wait_for(self._device)


class KvRun(NamedTuple):
    """Contiguous bytes of a layer's page: the whole page, or some neighbouring heads.

    Attributes:
        in_page: Offset of the run in the page as the host lays it out.
    """

    in_page: int
    num_bytes: int


class Freed(NamedTuple):
    """The result of giving memory back.

    Attributes:
        predicted_bytes: Bytes that moved away, of the pool that the engine started with.
        freed_bytes: Bytes really given back, as the kernel counts them.
    """

    predicted_bytes: int
    freed_bytes: int


class HostKv:
    """KV of all layers, each in its own address range with room for ``growth`` times the blocks.

    On a GPU, where memory that is not backed cannot be touched, it replaces ``kv_caches``, which
    must not be touched any more, and there is no growth.

    Args:
        kernels: Kernels that compute attention with this KV; None if vLLM's own do, on a CPU.

    Attributes:
        tensors: ``[max_blocks, heads, ...]`` by the name of the attention, in layer order.
        num_blocks: Number of blocks of the pool when the engine started.
        max_blocks: Number of blocks for which address space is reserved.
        page_bytes: Bytes of one block of one layer.
        head_bytes: Bytes of one KV head in such a block.
        device: Copier of blocks to and from pages in host memory; None if copies can access the
            blocks in place.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        growth: float,
        kernels: Kernels | None = None,
    ) -> None:
        first = next(iter(kv_caches.values()))
        self.num_blocks = int(first.shape[0])
        self._on_cpu = first.device.type == "cpu"
        # What a GPU has not backed must not be touched, and nothing tells when the pool has grown.
        growth = growth if self._on_cpu else 1.0
        self.max_blocks = max(self.num_blocks, int(self.num_blocks * growth))
        self.num_heads = int(first.shape[1])
        self.page_bytes = first[0].numel() * first.element_size()
        self.head_bytes = self.page_bytes // self.num_heads
        self.block_shape = tuple(first.shape[1:])
        self.dtype = first.dtype
        shape = (self.max_blocks, *self.block_shape)
        slab_bytes = self.max_blocks * self.page_bytes
        device = first.device
        if not self._on_cpu:
            release(kv_caches.values())
        self._slabs = {name: make_slab(slab_bytes, device) for name in kv_caches}
        self.tensors = {name: slab.tensor(shape, self.dtype) for name, slab in self._slabs.items()}
        for slab in self._slabs.values():
            slab.populate(self.num_blocks * self.page_bytes)
        self.device = DeviceKv(self.tensors, kernels) if kernels is not None else None

    def shape(self, layout: str, block_size_tokens: int) -> KvShape:
        """Return the shape and layout of the KV, which a guest adopts for its own KV."""
        dtype = str(self.dtype).removeprefix("torch.")
        return KvShape(self.max_blocks, self.block_shape, dtype, layout, block_size_tokens)

    def memory(self, name: str) -> Memory:
        slab = self._slabs[name]
        return Memory(slab.address, slab.num_bytes, True, slab)

    def runs(self, heads: Sequence[int] | None) -> list[KvRun]:
        """Return the whole page of a layer, or the runs of neighbouring heads in the page."""
        if heads is None:
            return [KvRun(0, self.page_bytes)]
        return [
            KvRun(first * self.head_bytes, count * self.head_bytes) for first, count in spans(heads)
        ]

    def free(
        self, name: str, heads: Sequence[int] | None, blocks: Sequence[int] | None = None
    ) -> Freed:
        """Give the memory of a layer, or of some of its heads or blocks, back to the system.

        On a GPU only the memory of a whole layer: single blocks are smaller than the unit that can
        be given back, and are written again without notice.
        """
        slab = self._slabs[name]
        ranges = [
            (block * self.page_bytes + run.in_page, run.num_bytes)
            for block in (range(self.max_blocks) if blocks is None else blocks)
            for run in self.runs(heads)
        ]
        num_blocks = self.num_blocks if blocks is None else len(blocks)
        predicted = num_blocks * sum(run.num_bytes for run in self.runs(heads))
        if not self._on_cpu and (heads is not None or blocks is not None):
            return Freed(predicted, 0)
        return Freed(predicted, slab.give_back(ranges))

    def poison(self, name: str, heads: Sequence[int] | None, blocks: Iterable[int]) -> None:
        """Overwrite blocks that have moved away with NaN, so that a stale read shows at once."""
        which = torch.tensor(sorted(blocks), dtype=torch.int64)
        for head in range(self.num_heads) if heads is None else heads:
            self.tensors[name][which, head] = float("nan")

    def heal(self, name: str, heads: Sequence[int] | None) -> None:
        """Overwrite NaN of ``poison`` with zeros: attention multiplies unwritten slots by zero."""
        for head in range(self.num_heads) if heads is None else heads:
            self.tensors[name][: self.num_blocks, head] = 0

    def heal_blocks(self, name: str, blocks: npt.NDArray[np.int64]) -> None:
        """Overwrite NaN of ``poison`` with zeros in single blocks of a layer."""
        self.tensors[name][torch.from_numpy(blocks)] = 0

    def copy_run(
        self,
        name: str,
        run: KvRun,
        blocks: Sequence[int],
        other: Memory,
        offsets: npt.NDArray[np.int64],
        *,
        saves: bool,
    ) -> None:
        """Copy a run of each block's page between this KV and other memory of this process.

        Args:
            offsets: Offset of each block's run in ``other``, in bytes.
            saves: True to copy from this KV to ``other``, False for the reverse.
        """
        if self.device is None:
            own, pages = self.memory(name), np.asarray(blocks, np.int64) * self.page_bytes
        else:
            rows = torch.empty(len(blocks), self.page_bytes, dtype=torch.uint8)
            own = Memory(rows.data_ptr(), rows.numel(), True, rows)
            pages = np.arange(len(blocks), dtype=np.int64) * self.page_bytes
            first = run.in_page // self.head_bytes
            heads = range(first, first + run.num_bytes // self.head_bytes)
            if saves:
                self.device.pack(name, blocks, rows, heads)
        both = (other, offsets), (own, pages + run.in_page)
        (target, to), (source, at) = both if saves else both[::-1]
        _native.copy_regions(
            target.address, source.address, to, at,
            run.num_bytes, target.num_bytes, source.num_bytes,
        )  # fmt: skip
        if self.device is not None and not saves:
            self.device.unpack(name, blocks, rows, heads)

    @property
    def must_be_backed(self) -> bool:
        """Return whether memory that was given back must not be touched before ``populate``."""
        return not self._on_cpu

    def populate(self, name: str, num_blocks: int) -> None:
        """Back the first blocks of a layer with memory before the layer comes home."""
        self._slabs[name].populate(num_blocks * self.page_bytes)

    @property
    def resident_bytes(self) -> int:
        return sum(slab.resident_bytes() for slab in self._slabs.values())


def make_slab(num_bytes: int, device: torch.device) -> Slab | GpuSlab | PlainSlab:
    """Return a slab in the memory of ``device``."""
    if device.type == "cpu":
        return Slab(num_bytes)
    if device.type == "cuda" and has_gpu_slabs():
        return GpuSlab(num_bytes, device)
    return PlainSlab(num_bytes, device)


def release(tensors: Iterable[torch.Tensor]) -> None:
    """Give the memory of tensors back to their device; they must not be touched any more."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def blocks_gained(num_blocks: int, max_blocks: int, away_bytes: int, kept_bytes: int) -> int:
    """Return the number of blocks by which the pool can grow if all remaining layers grow alike.

    Args:
        num_blocks: Number of blocks of the pool when nothing is away.
        max_blocks: Number of blocks for which address space is reserved.
        away_bytes: Bytes of one block that are in guests.
        kept_bytes: Bytes of one block that are on the host.

    Returns:
        Whole blocks that fit into the freed memory, within ``max_blocks``.
    """
    if not kept_bytes:
        return max_blocks - num_blocks
    return min(num_blocks * away_bytes // kept_bytes, max_blocks - num_blocks)
