"""Slabs: reserved ranges of addresses whose pages come with the first touch and can be given back.

``Slab`` is host memory. ``GpuSlab`` maps granules by CUDA's virtual memory; ``PlainSlab`` is memory
from torch for builds without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from banaserve.errors import UserError
from banaserve.platform import linux

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


class GpuSlab:
    """Memory of ``num_bytes`` on ``device``, of which only what is populated may be touched.

    Attributes:
        address: Of its first byte.
        num_bytes: Reserved, in whole granules.

    Raises:
        UserError: banaserve was built without CUDA.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        try:
            from banaserve import _native_cuda
        except ImportError:
            raise UserError(
                "this build of banaserve has no GPU slabs: build it with BANASERVE_CUDA=1"
            ) from None
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._device = torch.device("cuda", index)
        self._slab = _native_cuda.GpuSlab(num_bytes, index)
        self.address = self._slab.address
        self.num_bytes = self._slab.num_bytes

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``shape`` from the first byte on, contiguous; keeps the slab alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._bytes(0, count).view(dtype).view(shape)

    def populate(self, num_bytes: int) -> bool:
        """Back the first ``num_bytes`` with memory, zero where it was not backed.

        Returns:
            True: what is not backed must not be touched here, so there is no doing without.

        Raises:
            MemoryError: The device is short of memory; nothing has changed.
        """
        for offset in self._slab.map(0, num_bytes):
            self._bytes(offset, self._slab.granule_bytes).zero_()
        return True

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Let go of the granules that lie wholly inside of ``(offset, length)`` ranges.

        Waits for the device. What is given back must be populated before it is touched again.

        Returns:
            Bytes that were backed by memory and are not any more.
        """
        torch.cuda.synchronize(self._device)
        return sum(self._slab.unmap(start, length) for start, length in merged(ranges))

    def resident_bytes(self) -> int:
        """Bytes that are backed by memory."""
        return self._slab.mapped_bytes

    def _bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        part = _Bytes(self.address + offset, num_bytes, self._slab)
        return torch.as_tensor(part, device=self._device)


class PlainSlab:
    """Memory of ``num_bytes`` on ``device`` from torch: what it holds it keeps.

    In the place of ``GpuSlab`` in a build without CUDA.

    Attributes:
        num_bytes: All of them are backed.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._all = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address = self._all.data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``shape`` from the first byte on, contiguous; keeps the memory alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._all[:count].view(dtype).view(shape)

    def populate(self, num_bytes: int) -> bool:
        """True: all of it is there."""
        return True

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """0: torch takes back no part of a tensor."""
        return 0

    def resident_bytes(self) -> int:
        """All of them."""
        return self.num_bytes


def has_gpu_slabs() -> bool:
    """Whether this build of banaserve has those."""
    return importlib.util.find_spec("banaserve._native_cuda") is not None


class _Bytes:
    """What torch asks of an object whose device memory it takes over without a copy."""

    def __init__(self, address: int, num_bytes: int, owner: Any) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
