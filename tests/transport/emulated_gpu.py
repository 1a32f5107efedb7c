"""Memory of a GPU that is a file, which another process opens by a handle."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Literal

import numpy as np

from banaserve.transport.errors import RefusedError
from banaserve.transport.memory import Memory, Runs
from banaserve.transport.regions.gpu_memory import HANDLE_BYTES, rows_of

_HANDLE = struct.Struct("<QQ")


class _Shared:
    """Mapping of a file, which is closed with it."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.bytes = np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)

    def __del__(self) -> None:
        os.close(self.fd)


class EmulatedGpu:
    """See ``regions.gpu_memory.CudaGpu``; several processes see the same one."""

    nixl_kind: Literal["DRAM", "VRAM"] = "DRAM"
    index = 0

    def __init__(self) -> None:
        self.num_calls = 0

    def reserve(self, num_bytes: int) -> Memory:
        fd = os.memfd_create("gpu", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return self._mapped(fd, num_bytes)

    def share(self, memory: Memory) -> bytes:
        assert isinstance(memory.owner, _Shared)
        return _HANDLE.pack(os.getpid(), memory.owner.fd).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, num_bytes: int) -> Memory:
        pid, number = _HANDLE.unpack(handle[: _HANDLE.size])
        try:
            return self._mapped(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR), num_bytes)
        except OSError as error:
            raise RefusedError(f"the memory is gone: {error}") from error

    def zero(self, memory: Memory, first_byte: int, num_bytes: int) -> None:
        memory.view()[first_byte : first_byte + num_bytes] = 0

    def copy_runs(
        self,
        target: Memory,
        source: Memory,
        target_offsets: Runs,
        source_offsets: Runs,
        run_bytes: int,
    ) -> None:
        for rows in rows_of(target_offsets, source_offsets, run_bytes):
            self.num_calls += 1
            for row in range(rows.num_rows):
                to = target.address + rows.target + row * rows.target_step
                at = source.address + rows.source + row * rows.source_step
                ctypes.memmove(to, at, rows.width_bytes)

    @staticmethod
    def _mapped(fd: int, num_bytes: int) -> Memory:
        shared = _Shared(fd, num_bytes)
        return Memory(shared.bytes.ctypes.data, num_bytes, True, shared)
