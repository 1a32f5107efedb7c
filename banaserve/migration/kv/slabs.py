"""Slabs: reserved address ranges whose pages are allocated on first touch and can be given back.

``Slab`` is host memory. ``GpuSlab`` maps granules by CUDA's virtual memory; ``PlainSlab`` is memory
from torch for builds without CUDA. ``wait_for`` waits for a whole device, which CUDA refuses to all
threads while one captures a graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import mmap
import threading
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from banaserve.base.errors import UserError
from banaserve.base.platform import linux
from banaserve.migration.rpc.tensors import bytes_of
from banaserve.transport.memory import Memory

_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.RLock()  # a guest may be lost while its host captures a graph


def wait_for(device: torch.device) -> None:
    """Wait for the work of all threads and streams; first for the end of a capture."""
    with _lock:
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def no_wait() -> Iterator[None]:
    """Return a context within which no other thread of this process is in ``wait_for``."""
    with _lock:
        yield


class Slab:
    """Anonymous memory of ``num_bytes``, zero where it has not been written.

    Attributes:
        address: Address of the first byte, page aligned.
        num_bytes: Reserved bytes, whether backed by memory or not.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = _up(num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._map = mmap.mmap(-1, self.num_bytes, flags=flags)
        self.bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address = int(self.bytes.ctypes.data)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor from the first byte on; it keeps the slab alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(self.bytes[:count]).view(dtype).view(shape)

    def populate(self, num_bytes: int) -> None:
        """Back the first ``num_bytes`` with memory; some kernels do so on first touch only."""
        with contextlib.suppress(OSError):
            linux.madvise(self.address, _up(num_bytes), linux.MADV_POPULATE_WRITE)

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Release the pages that are wholly inside of ``(offset, length)`` ranges.

        Their bytes are zero afterwards.

        Returns:
            Number of bytes that were backed by memory and are not any more.
        """
        before = self.resident_bytes()
        for start, length in merged(ranges):
            first = _up(start)
            last = (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                linux.madvise(self.address + first, last - first, linux.MADV_DONTNEED)
        return before - self.resident_bytes()

    def resident_bytes(self) -> int:
        """Return the number of bytes that are backed by memory, as the kernel reports.

        Raises:
            OSError: The kernel does not report it.
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
    """Return sorted ranges, neighbours joined: fewer calls, and no page between them is missed."""
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
    """Memory of ``num_bytes`` on ``device``, of which only the populated part may be touched.

    Attributes:
        num_bytes: Reserved bytes, in whole granules.

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
        """Return a contiguous tensor from the first byte on; it keeps the slab alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._bytes(0, count).view(dtype).view(shape)

    def populate(self, num_bytes: int) -> None:
        """Back the first ``num_bytes`` with memory, zero where it was not backed.

        Raises:
            MemoryError: The device has too little free memory; nothing has changed.
        """
        try:
            backed = self._slab.map(0, num_bytes)
        except MemoryError:
            with no_wait():  # torch keeps what is freed, and the driver does not ask for it
                torch.cuda.empty_cache()
            backed = self._slab.map(0, num_bytes)
        for offset in backed:
            self._bytes(offset, self._slab.granule_bytes).zero_()
        if backed:  # a step on another thread's stream may be the next to write here
            torch.cuda.current_stream(self._device).synchronize()

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Release the granules that are wholly inside of ranges; see ``Slab``.

        Waits for the device. Released memory must be populated before it is touched again.
        """
        wait_for(self._device)
        return sum(self._slab.unmap(start, length) for start, length in merged(ranges))

    def resident_bytes(self) -> int:
        """Return the number of bytes that are backed by memory."""
        return self._slab.mapped_bytes

    def _bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        part = Memory(self.address + offset, num_bytes, True, self._slab, is_on_gpu=True)
        return bytes_of(part, self._device)


class PlainSlab:
    """Memory of ``num_bytes`` on ``device`` from torch, which cannot be given back in part.

    Replaces ``GpuSlab`` in a build without CUDA.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._all = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address = self._all.data_ptr()

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor from the first byte on; it keeps the memory alive."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._all[:count].view(dtype).view(shape)

    def populate(self, num_bytes: int) -> None:
        """Do nothing: all of the memory is backed."""

    def give_back(self, ranges: Iterable[tuple[int, int]]) -> int:
        """Return 0: torch takes back no part of a tensor."""
        return 0

    def resident_bytes(self) -> int:
        """Return the size: all bytes are backed by memory."""
        return self.num_bytes


def has_gpu_slabs() -> bool:
    """Return whether this build of banaserve has ``GpuSlab``."""
    return importlib.util.find_spec("banaserve._native_cuda") is not None
