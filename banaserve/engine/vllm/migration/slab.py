"""Reserved ranges of addresses whose pages come with the first touch and can be given back."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import torch

from banaserve import linux

_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


class Slab:
    """Anonymous memory of ``num_bytes``, zero where it has not been written.

    Attributes:
        address: Of its first byte, page aligned.
        num_bytes: Reserved, which says nothing of how much is backed by memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = _up(num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``shape`` from the first byte on, contiguous; keeps the slab alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self.bytes[:count]).view(dtype).view(shape)

    def populate(self, num_bytes: int) -> bool:
        """Back the first ``num_bytes`` with memory. False where the kernel does not do it."""
        try:
            linux.madvise(self.address, _up(num_bytes), linux.MADV_POPULATE_WRITE)
        except OSError:
            return False
        return True

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Let go of the pages that lie wholly inside of ``(offset, length)`` ranges.

        Their bytes are zero afterwards.

        Returns:
            Bytes that were backed by memory and are not any more.
        """
        before = self.resident_bytes()
        for start, length in merged(ranges):
            first = _up(start)
            last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                linux.madvise(self.address + first, last - first, linux.MADV_DONTNEED)
        return before - self.resident_bytes()

    def resident_bytes(self) -> int:
        """Bytes that are backed by memory, as the kernel says.

        Raises:
            OSError: The kernel does not say.
        """
        num_pages = self.num_bytes // mmap.PAGESIZE
        pages = np.empty(num_pages, dtype=np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(self.address),
            ctypes.c_size_t(self.num_bytes),
            ctypes.c_void_p(pages.ctypes.data),
        )
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum()) * mmap.PAGESIZE


def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ``(offset, length)`` with neighbours joined: fewer calls, and no page lost between."""
    joined: list[tuple[int, int]] = []
    for start, length in sorted(ranges):
        if joined and start <= sum(joined[-1]):
            first, so_far = joined[-1]
            joined[-1] = (first, max(so_far, start + length - first))
        else:
            joined.append((start, length))
    return joined


def _up(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
