"""Ranges of this process's memory, the runs in them that a transfer copies, and the copying."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from banaserve import _native

PAGE_BYTES = mmap.PAGESIZE
SLICE_BYTES = 4 * 2**20
_NONE = np.empty(0, np.int64)
Runs = npt.NDArray[np.int64]


class Memory(NamedTuple):
    """Range of addresses of this process.

    A copy is four times slower if its target begins 1 to 31 bytes after its source, by their
    offsets within a page: its loads then wait for stores to the same offset of another page. A copy
    from page-aligned memory into a large numpy array, which begins 16 bytes after the start of a
    page, is always such a copy; memory of ``regions.offered_region.reserve`` begins with a page.

    Attributes:
        address: Address of the first byte.
        num_bytes: Length of the range.
        writable: True if a read may copy into the range.
        owner: Object kept alive as long as this one; None if the caller keeps the memory alive.
        is_on_gpu: True if the range is memory of a GPU, which this process's code cannot read.
    """

    address: int
    num_bytes: int
    writable: bool = True
    owner: object = None
    is_on_gpu: bool = False

    @staticmethod
    def of(array: npt.NDArray[np.generic]) -> Memory:
        """Return the memory of a C-contiguous array.

        Raises:
            ValueError: The array is not contiguous.
        """
        if not array.flags.c_contiguous:
            raise ValueError("only a contiguous array is one range of memory")
        return Memory(array.ctypes.data, array.nbytes, bool(array.flags.writeable), array)

    def view(self) -> npt.NDArray[np.uint8]:
        """Return the same bytes as an array, ``[num_bytes]`` uint8; only of memory of the host."""
        assert not self.is_on_gpu
        if not self.num_bytes:
            return np.empty(0, np.uint8)
        array: npt.NDArray[np.uint8] = np.asarray(_Pointer(self))
        return array


class _Pointer:
    """Array interface of a memory range; numpy keeps this object, and so the owner, alive."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "data": (memory.address, not memory.writable),
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Plan(NamedTuple):
    """Checked runs of equal length to copy between local memory and a region.

    Attributes:
        local_offsets: Offsets of the runs in ``local``, ``[num_runs]`` int64, in bytes.
        remote_offsets: Offsets of the runs in the region, ``[num_runs]`` int64, in bytes.
        num_bytes: Length of each run.
        epoch: Epoch under which the transfer was submitted.
        writes: True if bytes are copied to the region, False if from it.
    """

    local: Memory
    local_offsets: npt.NDArray[np.int64]
    remote_offsets: npt.NDArray[np.int64]
    num_bytes: int
    epoch: int
    writes: bool

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all runs."""
        return self.num_bytes * int(self.local_offsets.size)

    def slices(self, slice_bytes: int = SLICE_BYTES) -> Iterator[Plan]:
        """Yield one or more parts of up to ``slice_bytes``; a transfer can stop between parts."""
        if not self.num_bytes or not self.local_offsets.size:
            yield self._replace(local_offsets=_NONE, remote_offsets=_NONE)
            return
        for first_byte in range(0, self.num_bytes, slice_bytes):
            num_bytes = min(slice_bytes, self.num_bytes - first_byte)
            runs_at_once = slice_bytes // num_bytes
            for first in range(0, self.local_offsets.size, runs_at_once):
                yield self._replace(
                    local_offsets=self.local_offsets[first : first + runs_at_once] + first_byte,
                    remote_offsets=self.remote_offsets[first : first + runs_at_once] + first_byte,
                    num_bytes=num_bytes,
                )


def whole_pages(first_byte: int, num_bytes: int) -> tuple[int, int]:
    """Return the first byte and the length of the whole pages within a range."""
    first = -(-first_byte // PAGE_BYTES) * PAGE_BYTES
    end = (first_byte + num_bytes) // PAGE_BYTES * PAGE_BYTES
    return first, max(0, end - first)


def copy_runs(
    target: Memory, source: Memory, target_offsets: Runs, source_offsets: Runs, run_bytes: int
) -> None:
    """Copy runs of equal length, without the GIL.

    Raises:
        ValueError: A run is out of bounds.
    """
    _native.copy_regions(
        target.address,
        source.address,
        target_offsets,
        source_offsets,
        run_bytes,
        target.num_bytes,
        source.num_bytes,
    )


CopyRuns = Callable[[Memory, Memory, Runs, Runs, int], None]
"""Function with the arguments of ``copy_runs``."""


def gather(
    target: Memory, source: Memory, offsets: Runs, run_bytes: int, copy: CopyRuns = copy_runs
) -> None:
    """Copy runs at ``offsets`` of ``source`` consecutively into ``target``."""
    packed = np.arange(offsets.size, dtype=np.int64) * run_bytes
    copy(target, source, packed, offsets, run_bytes)


def scatter(
    target: Memory, offsets: Runs, source: Memory, run_bytes: int, copy: CopyRuns = copy_runs
) -> None:
    """Copy consecutive runs of ``source`` to ``offsets`` of ``target``."""
    packed = np.arange(offsets.size, dtype=np.int64) * run_bytes
    copy(target, source, offsets, packed, run_bytes)
