"""GPU memory shared within one machine by CUDA IPC: a copy goes from GPU to GPU.

A page of shared memory beside each region holds the epoch, as ``shm`` does, and CUDA's handle.
"""

from __future__ import annotations

import struct

import numpy as np

from banaserve.transport.backends.shm import ShmTransport
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import Memory, whole_pages
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.gpu_memory import HANDLE_BYTES, CudaGpu
from banaserve.transport.regions.shared_file import SharedFile, new_file

NAME = "cuda_ipc"
_RECORD = struct.Struct(f"<Q{HANDLE_BYTES}s")


class CudaIpcTransport(ShmTransport):
    """Transport of memory of one GPU to processes of this user on this machine.

    Args:
        gpu: GPU whose memory is offered and which copies; None for the ``device`` of the options.

    Raises:
        RefusedError: The process cannot use that GPU.
    """

    name = NAME

    def __init__(self, options: TransportOptions, gpu: CudaGpu | None = None) -> None:
        super().__init__(options)
        self._gpu = gpu or CudaGpu(options.device)

    def _reserve(self, num_bytes: int, epoch: int) -> SharedFile:
        memory = self._gpu.reserve(num_bytes)
        handle = self._gpu.share(memory)
        file = GpuFile(new_file(_RECORD.size, epoch), self._gpu, memory)
        file.record.view()[:] = np.frombuffer(_RECORD.pack(num_bytes, handle), np.uint8)
        return file

    def _take(self, fd: int, descriptor: RegionDescriptor) -> SharedFile:
        return GpuFile(fd, self._gpu, None, descriptor.num_bytes)


class GpuFile(SharedFile):
    """Epoch and handle of a region in shared memory, whose bytes are memory of a GPU.

    Args:
        fd: File descriptor, see ``SharedFile``.
        memory: The region, in the process that owns it; None to open that of the file's handle.
        num_bytes: Size that a peer has stated.

    Raises:
        RefusedError: The file does not describe a region of this size, or it cannot be opened.
    """

    def __init__(self, fd: int, gpu: CudaGpu, memory: Memory | None, num_bytes: int = 0) -> None:
        super().__init__(fd, _RECORD.size, gpu.copy_runs)
        self.record = self.memory
        self._gpu = gpu
        if memory is None:
            size, handle = _RECORD.unpack(self.record.view().tobytes())
            if size != num_bytes:
                raise RefusedError("the peer's region has another size")
            memory = gpu.open(handle, num_bytes)
        self.memory = memory

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Overwrite the whole pages of a range with zeros; a GPU gives back no part of a region."""
        first, length = whole_pages(first_byte, num_bytes)
        if length:
            self._gpu.zero(self.memory, first, length)
        return length

    def populate(self, first_byte: int, num_bytes: int) -> None:
        """Do nothing: memory of a GPU is backed."""

    def close(self) -> None:
        """Close the descriptor; the memory ends with its last user."""
        super().close()
        self.memory = self.memory._replace(owner=None)
