"""Memory of one GPU by CUDA's runtime: reserving, sharing between processes, and copies of runs."""

from __future__ import annotations

import ctypes
import functools
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from banaserve.transport.errors import RefusedError
from banaserve.transport.memory import Memory, Runs

HANDLE_BYTES = 64
_GRANULE_BYTES = 2 * 2**20
"""CUDA serves smaller pieces from one block, and a handle shares the whole block."""
_MOST_STEP_BYTES = 2**31 - 1
"""Distance above which CUDA refuses rows: slots of a large store lie farther apart."""
_COPY_BY_ADDRESS = 4
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING = 1


class RowCopy(NamedTuple):
    """Copy of ``num_rows`` rows of ``width_bytes``, whose starts have equal distances.

    ``target`` and ``source`` are the offsets of the first row, ``target_step`` and
    ``source_step`` the distances of the rows there, all in bytes.
    """

    target: int
    source: int
    target_step: int
    source_step: int
    width_bytes: int
    num_rows: int


def rows_of(target_offsets: Runs, source_offsets: Runs, run_bytes: int) -> Iterator[RowCopy]:
    """Yield the copies of runs of ``run_bytes``, neighbours joined: each costs a call of CUDA."""
    if not run_bytes or not target_offsets.size:
        return
    steps = np.stack([np.diff(target_offsets), np.diff(source_offsets)])
    breaks = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(0)) + 1
    first, last = 0, target_offsets.size - 1
    for end in [*breaks.tolist(), last]:
        # A break right after ``first`` ends the step before it, not the one that begins here.
        while first < end or first == end == last:
            target, source = int(target_offsets[first]), int(source_offsets[first])
            count = end - first + 1
            ours, theirs = (int(step) for step in steps[:, first]) if count > 1 else (0, 0)
            if ours == theirs == run_bytes:
                yield RowCopy(target, source, 0, 0, count * run_bytes, 1)
            elif run_bytes <= min(ours, theirs) and max(ours, theirs) <= _MOST_STEP_BYTES:
                yield RowCopy(target, source, ours, theirs, run_bytes, count)
            else:
                count = 1
                yield RowCopy(target, source, 0, 0, run_bytes, 1)
            first += count


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaGpu:
    """One of the GPUs that this process sees; torch must have loaded CUDA's runtime before.

    Any thread may call. Memory is reachable by address from this process.

    Attributes:
        nixl_kind: NIXL's name of this kind of memory.
        index: Index of the GPU among those that this process sees.

    Raises:
        RefusedError: The process has no runtime of CUDA, or no such GPU.
    """

    nixl_kind: Literal["DRAM", "VRAM"] = "VRAM"

    def __init__(self, index: int) -> None:
        self.index = index
        self._cuda = _runtime()
        self._stream = ctypes.c_void_p()
        self._call("cudaStreamCreateWithFlags", ctypes.byref(self._stream), _NON_BLOCKING)

    def reserve(self, num_bytes: int) -> Memory:
        """Return zeroed memory, which is freed with its ``owner``.

        Raises:
            RefusedError: The GPU has too little memory.
        """
        address = ctypes.c_void_p()
        whole = -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(whole))
        memory = self._owned(address, num_bytes, "cudaFree")
        self.zero(memory, 0, num_bytes)
        return memory

    def share(self, memory: Memory) -> bytes:
        """Return a handle, ``HANDLE_BYTES`` bytes, by which another process opens the memory.

        Raises:
            RefusedError: The GPU or the system does not allow it.
        """
        handle = _Handle()
        address = ctypes.c_void_p(memory.address)
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def open(self, handle: bytes, num_bytes: int) -> Memory:
        """Return the memory of another process on this machine, on whichever GPU it is.

        Raises:
            RefusedError: The memory is gone, or this process cannot reach it.
        """
        address = ctypes.c_void_p()
        self._call(
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            _LAZY_PEER_ACCESS,
        )
        return self._owned(address, num_bytes, "cudaIpcCloseMemHandle")

    def zero(self, memory: Memory, first_byte: int, num_bytes: int) -> None:
        """Overwrite a range with zeros."""
        start = ctypes.c_void_p(memory.address + first_byte)
        self._call("cudaMemsetAsync", start, 0, ctypes.c_size_t(num_bytes), self._stream)
        self._call("cudaStreamSynchronize", self._stream)

    def copy_runs(
        self,
        target: Memory,
        source: Memory,
        target_offsets: Runs,
        source_offsets: Runs,
        run_bytes: int,
    ) -> None:
        """Copy runs of equal length within bounds; on return they are copied.

        Either side may be memory of this GPU, of another, or of the host.
        """
        for rows in rows_of(target_offsets, source_offsets, run_bytes):
            self._call(
                "cudaMemcpy2DAsync",
                ctypes.c_void_p(target.address + rows.target),
                ctypes.c_size_t(rows.target_step or rows.width_bytes),
                ctypes.c_void_p(source.address + rows.source),
                ctypes.c_size_t(rows.source_step or rows.width_bytes),
                ctypes.c_size_t(rows.width_bytes),
                ctypes.c_size_t(rows.num_rows),
                _COPY_BY_ADDRESS,
                self._stream,
            )
        self._call("cudaStreamSynchronize", self._stream)

    def _owned(self, address: ctypes.c_void_p, num_bytes: int, release: str) -> Memory:
        assert address.value is not None
        owner = _Owner()
        end = weakref.finalize(owner, _release, self._cuda, self.index, release, address.value)
        end.atexit = False  # the driver frees what a process leaves
        return Memory(address.value, num_bytes, True, owner, is_on_gpu=True)

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the runtime on this GPU, whatever thread this is."""
        for function, given in (("cudaSetDevice", (self.index,)), (name, arguments)):
            if code := getattr(self._cuda, function)(*given):
                self._cuda.cudaGetErrorString.restype = ctypes.c_char_p
                reason = (self._cuda.cudaGetErrorString(code) or b"").decode(errors="replace")
                self._cuda.cudaGetLastError()  # or the next call of torch would report it
                raise RefusedError(f"GPU {self.index}: {function}: {reason} ({code})")


class _Owner:
    """Object whose end releases memory of a GPU."""


def _release(cuda: ctypes.CDLL, index: int, function: str, address: int) -> None:
    cuda.cudaSetDevice(index)
    getattr(cuda, function)(ctypes.c_void_p(address))


@functools.cache
def _runtime() -> ctypes.CDLL:
    """Return the runtime that this process has loaded: a second one would not know its memory."""
    preloaded = ctypes.CDLL(None)
    if hasattr(preloaded, "cudaIpcGetMemHandle"):
        return preloaded
    found = re.search(r"/\S*libcudart\.so\S*", Path("/proc/self/maps").read_text())
    if found is None:
        raise RefusedError("this process has not loaded CUDA's runtime")
    return ctypes.CDLL(found.group())
