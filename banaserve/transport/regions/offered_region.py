"""Regions that this process offers, and the private memory of those that its threads copy."""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from banaserve.base.clock import wait_parts
from banaserve.base.platform.linux import MADV_DONTNEED, madvise
from banaserve.transport.errors import RefusedError, StaleEpochError, TransferTimeoutError
from banaserve.transport.memory import Memory, whole_pages
from banaserve.transport.regions.descriptor import RegionDescriptor, check_offer, check_range
from banaserve.transport.regions.gpu_memory import CudaGpu
from banaserve.transport.regions.shared_file import SharedFile

_CLOSE_WAIT_S = 1.0


class PrivateMemory:
    """Memory that this process's own threads copy to and from on behalf of its peers.

    Args:
        memory: Memory from ``reserve``, so that ``release`` can free pages, or of ``gpu``.
    """

    def __init__(self, memory: Memory, epoch: int, gpu: CudaGpu | None = None) -> None:
        self.memory = memory
        self._gpu = gpu
        self._epoch = epoch
        self._closed = False
        self._changed = threading.Condition()
        self._users: Counter[int] = Counter()

    @contextmanager
    def use(self, epoch: int) -> Iterator[None]:
        """Keep ``advance`` to another epoch from returning while bytes move.

        Raises:
            StaleEpochError: The region has another epoch.
            RefusedError: The region is closed.
        """
        with self._changed:
            if self._closed:
                raise RefusedError("the region is closed")
            if epoch != self._epoch:
                raise StaleEpochError(f"the region is at epoch {self._epoch}, not {epoch}")
            self._users[epoch] += 1
        try:
            yield
        finally:
            with self._changed:
                self._users[epoch] -= 1
                self._changed.notify_all()

    def advance(self, epoch: int, timeout_s: float) -> None:
        """Set the epoch and wait until no bytes move under another epoch.

        Raises:
            TransferTimeoutError: Bytes still move.
        """
        with self._changed:
            self._epoch = epoch
            self._drain(timeout_s, kept=epoch)

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Give the whole pages of a range back, or overwrite them; return their length in bytes."""
        first, length = whole_pages(first_byte, num_bytes)
        if length and self._gpu is not None:
            self._gpu.zero(self.memory, first, length)
        elif length:
            madvise(self.memory.address + first, length, MADV_DONTNEED)
        return length

    def retire(self, timeout_s: float) -> None:
        """Refuse all transfers from now on.

        Raises:
            TransferTimeoutError: Bytes still move.
        """
        with self._changed:
            self._closed = True
            self._drain(timeout_s, kept=None)

    def close(self) -> None:
        """End the memory with its last user, which may be a thread that still copies."""
        self.memory = self.memory._replace(owner=None)

    def _drain(self, timeout_s: float, kept: int | None) -> None:
        def is_free() -> bool:
            return not any(count for epoch, count in self._users.items() if epoch != kept)

        if not any(self._changed.wait_for(is_free, part_s) for part_s in wait_parts(timeout_s)):
            raise TransferTimeoutError(
                f"a peer has not ended its transfer within {timeout_s:g} s and stands still"
            )


RegionStore = SharedFile | PrivateMemory


class OfferedRegion:
    """Memory that a peer may copy to and from, on the owner's side.

    Args:
        store: Place of the bytes, which guards them by the epoch.
        forget: Function that removes the region from the transport's table; returns False if it
            was removed before.

    Attributes:
        descriptor: Descriptor by which the peer opens the region.
        epoch: Epoch of the region; transfers of any other epoch are refused.
    """

    def __init__(
        self,
        descriptor: RegionDescriptor,
        store: RegionStore,
        forget: Callable[[OfferedRegion], bool],
    ) -> None:
        self.descriptor = descriptor
        self.epoch = descriptor.epoch
        self.store = store
        self._forget = forget

    @property
    def memory(self) -> Memory:
        """Bytes of the region in this process."""
        return self.store.memory

    def advance(self, epoch: int, timeout_s: float) -> None:
        """Accept only ``epoch`` from now on; on return no transfer of another epoch is under way.

        Raises:
            RefusedError: ``epoch`` is smaller than the current one.
            TransferTimeoutError: A peer hangs in the middle of a transfer. The region refuses new
                transfers of another epoch, but that transfer is not known to have ended.
        """
        check_offer(self.descriptor.num_bytes, epoch)
        if epoch < self.epoch:
            raise RefusedError(f"epoch {epoch} lies before {self.epoch}")
        self.epoch = epoch
        self.store.advance(epoch, timeout_s)

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Give the whole pages of a range back to the system; they read as zero until written.

        Returns:
            Maximum number of bytes given back: whole pages of the range.

        Raises:
            RefusedError: The range is outside the region.
        """
        check_range(first_byte, num_bytes, self.descriptor.num_bytes)
        return self.store.release(first_byte, num_bytes)

    def close(self) -> None:
        """Refuse every transfer and free the memory; ``memory`` must not be used afterwards."""
        if self._forget(self):
            # A peer that hangs in a copy of shared memory writes to its own mapping, which harms
            # no other.
            with suppress(TransferTimeoutError):
                self.store.retire(_CLOSE_WAIT_S)
            self.store.close()


def reserve(num_bytes: int) -> Memory:
    """Reserve zeroed private memory, page aligned, whose pages are allocated at their first write.

    Raises:
        RefusedError: The system has no address range of this size.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise RefusedError(f"cannot reserve {num_bytes} bytes: {error}") from None
    return Memory.of(np.frombuffer(mapping, np.uint8))
