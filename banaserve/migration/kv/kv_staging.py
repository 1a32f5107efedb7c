"""KV of a guest on its device, and the buffer through which blocks arrive.

The buffer is in memory of the device if the transport offers that, otherwise in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from banaserve.base.errors import MigrationError, ProtocolError
from banaserve.engine.connector.worker_side.gpu_block_copy import PinnedPool
from banaserve.kernels.interface import Kernels
from banaserve.migration.kv.host_kv import DeviceKv, make_slab
from banaserve.migration.rpc.messages import CopyPages, KvShape
from banaserve.migration.rpc.tensors import bytes_of, dtype_named
from banaserve.transport.interface import Transport
from banaserve.transport.regions.offered_region import OfferedRegion

STAGING_BYTES = 32 << 20
"""Size of a staging region: half for copies that steps wait for, half for background copies."""


def make_kv(
    kv: KvShape, heads: Mapping[str, int], num_backed_blocks: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return zeroed KV caches ``[num_blocks, num_heads, ...]`` on ``device``, by attention.

    Args:
        heads: Number of KV heads of each attention.
        num_backed_blocks: Number of blocks backed with memory at once. On a GPU all blocks are:
            its memory is not allocated on first touch.

    Raises:
        MigrationError: The device has no memory for the caches.
    """
    dtype = dtype_named(kv.dtype)
    num_backed = num_backed_blocks if device.type == "cpu" else kv.num_blocks
    caches: dict[str, torch.Tensor] = {}
    try:
        for name, num_heads in heads.items():
            shape = (kv.num_blocks, num_heads, *kv.block_shape[1:])
            block_bytes = torch.Size(shape[1:]).numel() * dtype.itemsize
            slab = make_slab(kv.num_blocks * block_bytes, device)
            slab.populate(num_backed * block_bytes)
            caches[name] = slab.tensor(shape, dtype)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MigrationError(f"there is no memory for its KV: {error}") from None
    return caches


class StagingBuffer:
    """An offered region of pages on their way to or from a guest's KV.

    Args:
        caches: KV caches as returned by ``make_kv``.

    Attributes:
        region: Offered region that the peer copies to and from.
    """

    def __init__(
        self,
        transport: Transport,
        caches: Mapping[str, torch.Tensor],
        kernels: Kernels,
        epoch: int,
    ) -> None:
        self._kv = DeviceKv(caches, kernels)
        one_block = sum(self._kv.page_bytes.values())
        self.region: OfferedRegion = transport.offer(max(STAGING_BYTES, 2 * one_block), epoch)
        device = next(iter(caches.values())).device
        memory = self.region.memory
        self._bytes = bytes_of(memory, device)
        self._pinned: PinnedPool | None = None
        if device.type == "cuda" and not memory.is_on_gpu:
            # Nothing is queued behind a call that has returned.
            self._pinned = PinnedPool(device, lambda: None)
            self._pinned.pin(memory.view())

    def close(self) -> None:
        """Unpin and close the region."""
        if self._pinned is not None:
            self._pinned.release()
        self.region.close()

    def copy(self, request: CopyPages) -> None:
        """Copy pages between the region and the device; the copy is complete on return.

        Raises:
            ProtocolError: The request has another epoch, or names an unknown attention, block or
                page.
        """
        if request.epoch != self.region.epoch:
            raise ProtocolError(f"pages are at epoch {self.region.epoch}, not {request.epoch}")
        try:
            for name in request.names:
                self._kv.check(name, request.blocks)
        except ValueError as error:
            raise ProtocolError(str(error)) from None
        sizes = [len(request.blocks) * self._kv.page_bytes[name] for name in request.names]
        if not 0 <= request.start <= len(self._bytes) - sum(sizes):
            raise ProtocolError("pages are named that lie outside of the region")
        start = request.start
        move = self._kv.unpack if request.to_device else self._kv.pack
        for name, size in zip(request.names, sizes, strict=True):
            pages = self._bytes[start : start + size].view(-1, self._kv.page_bytes[name])
            move(name, request.blocks, pages)
            start += size
