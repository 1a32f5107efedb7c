"""KV where attention reads it, block by block to and from pages in host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch

from banaserve.kernels.interface import Kernels
from banaserve.kernels.packed_pages import STAGE_BYTES, PackedPages
from banaserve.transport.local_region import reserve
from banaserve.transport.memory import Memory


class DeviceKv:
    """Packs blocks on their device, so that a page crosses the bus as one run of bytes.

    A page is one block of one attention: head by head, each token's key before its value. Its
    bytes are in host memory when a call returns. May be called from several threads.

    Args:
        caches: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` by attention, all on one
            device.
        kernels: Of that device.

    Attributes:
        page_bytes: Of each attention.
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
        """Refuse blocks that are not here.

        Raises:
            ValueError: An unknown attention, a block out of range, or one that is named twice.
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
            pages: ``[len(blocks), page_bytes]`` uint8 in host memory.
            heads: Which; what pages hold of others means nothing afterwards. None: all.
        """
        with self._lock:
            for part, room in self._pieces(name, len(blocks), pages):
                self._packed[name].pack(0, blocks[part], room, heads)
                if self._stage is not None:
                    pages[part].copy_(room)

    def unpack(
        self,
        name: str,
        blocks: Sequence[int],
        pages: torch.Tensor,
        heads: Sequence[int] | None = None,
    ) -> None:
        """Copy pages to blocks: ``pack`` the other way; other heads keep their values."""
        with self._lock:
            for part, room in self._pieces(name, len(blocks), pages):
                if self._stage is not None:
                    room.copy_(pages[part])
                self._packed[name].unpack(0, blocks[part], room, heads)
            self._wait()

    def room(self, num_bytes: int) -> Memory:
        """Memory of this process for pages; for a GPU it is pinned."""
        if self._device.type != "cuda":
            return reserve(num_bytes)
        return Memory.of(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy())

    def _pieces(
        self, name: str, count: int, pages: torch.Tensor
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As many blocks at a time as there is room for on the device, and that room."""
        if not count:
            return
        self._wait()
        if self._stage is None:
            yield slice(0, count), pages
            return
        size = self.page_bytes[name]
        per_time = len(self._stage) // size
        for first in range(0, count, per_time):
            part = slice(first, min(first + per_time, count))
            num_pages = part.stop - part.start
            yield part, self._stage[: num_pages * size].view(num_pages, size)

    def _wait(self) -> None:
        """For what other threads and streams have queued, which may write the same blocks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
