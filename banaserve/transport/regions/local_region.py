"""Region in this process's private memory, for transports that copy by threads of this process."""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from banaserve.base.platform.linux import MADV_DONTNEED, madvise
from banaserve.transport.errors import RefusedError, StaleEpochError, TransferTimeoutError
from banaserve.transport.memory import Memory, whole_pages
from banaserve.transport.regions.argument_checks import check_offer, check_range
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.gpu_memory import CudaGpu

_CLOSE_WAIT_S = 1.0


class LocalRegion:
    """Memory that this process's own threads copy to and from on behalf of its peers.

    Args:
        descriptor: Descriptor of the region.
        memory: Bytes of the region, from ``reserve``, so that ``release`` can free pages.
        forget: Function that removes the region from the transport's table; returns False if it
            was removed before.
        gpu: GPU whose memory the region is; None for memory of the host.
    """

    def __init__(
        self,
        descriptor: RegionDescriptor,
        memory: Memory,
        forget: Callable[[LocalRegion], bool],
        gpu: CudaGpu | None = None,
    ) -> None:
        self.descriptor = descriptor
        self.memory = memory
        self.epoch = descriptor.epoch
        self._forget = forget
        self._gpu = gpu
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
            if epoch != self.epoch:
                raise StaleEpochError(f"the region is at epoch {self.epoch}, not {epoch}")
            self._users[epoch] += 1
        try:
            yield
        finally:
            with self._changed:
                self._users[epoch] -= 1
                self._changed.notify_all()

    def advance(self, epoch: int, timeout_s: float) -> None:
        check_offer(self.descriptor.num_bytes, epoch)
        with self._changed:
            if epoch < self.epoch:
                raise RefusedError(f"epoch {epoch} lies before {self.epoch}")
            self.epoch = epoch
            self._drain(timeout_s, kept=epoch)

    def release(self, first_byte: int, num_bytes: int) -> int:
        check_range(first_byte, num_bytes, self.descriptor.num_bytes)
        first, length = whole_pages(first_byte, num_bytes)
        if length and self._gpu is not None:
            self._gpu.zero(self.memory, first, length)
        elif length:
            madvise(self.memory.address + first, length, MADV_DONTNEED)
        return length

    def close(self) -> None:
        if not self._forget(self):
            return
        with self._changed:
            self._closed = True
            with suppress(TransferTimeoutError):
                self._drain(_CLOSE_WAIT_S, kept=None)
            # A thread that still copies keeps the memory; otherwise the last view ends it.
            self.memory = self.memory._replace(owner=None)

    def _drain(self, timeout_s: float, kept: int | None) -> None:
        deadline = time.monotonic() + timeout_s
        while any(count for epoch, count in self._users.items() if epoch != kept):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TransferTimeoutError(
                    f"a peer has not ended its transfer within {timeout_s:g} s and stands still"
                )
            self._changed.wait(left_s)


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
