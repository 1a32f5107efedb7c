"""The memory that holds the blocks: made once by the daemon, mapped by every client."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

from banaserve import linux
from banaserve.errors import StoreUnavailableError, UserError
from banaserve.kvstore.fingerprint import PAGE_BYTES, Fingerprint
from banaserve.kvstore.interface import Slot
from banaserve.kvstore.sizes import format_size

POISON = 0xFF


class SlotPool:
    """A sealed memfd of fixed size. It has no name in any file system and ends with its users."""

    def __init__(self, num_bytes: int) -> None:
        """Make the pool and fill its pages. Blocks for about half a second per GiB.

        Raises:
            UserError: There is not enough memory.
        """
        self.num_bytes = num_bytes // PAGE_BYTES * PAGE_BYTES
        if not self.num_bytes:
            raise UserError(f"a pool of {num_bytes} bytes is smaller than {PAGE_BYTES} bytes")
        available_bytes = linux.available_memory_bytes()
        if num_bytes > available_bytes:
            raise UserError(
                f"a pool of {format_size(num_bytes)} does not fit: "
                f"{format_size(available_bytes)} of memory are available"
            )
        self.fd = os.memfd_create("banaserve-kvstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, linux.SEALS)
        try:
            self._memory = map_memory(self.fd, self.num_bytes)
            populate(self._memory)
        except OSError as error:
            raise UserError(f"cannot fill a pool of {format_size(num_bytes)}: {error}") from error

    def part(self, first_byte: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A view of a range; the pool's memory stays mapped as long as it lives."""
        return self._memory[first_byte : first_byte + num_bytes]

    def poison(self, first_byte: int, num_bytes: int) -> None:
        """Overwrite a range, so that a read of freed memory shows."""
        self._memory[first_byte : first_byte + num_bytes] = POISON

    def close(self) -> None:
        """Let go of the pool. Clients keep their mappings."""
        del self._memory
        os.close(self.fd)


class PoolView:
    """A client's mapping of the pool. The memory stays mapped as long as this object lives.

    Attributes:
        memory: The pool's bytes, ``[pool_bytes]`` uint8, shared with every other client.
        base_address: Of ``memory`` in this process.
        slot_bytes: Slot ``i`` begins at ``base_address + i * slot_bytes``.
        generation: Only slots of this generation lie in this view.
    """

    def __init__(self, fd: int, num_bytes: int, generation: int, fingerprint: Fingerprint) -> None:
        self.memory = map_memory(fd, num_bytes)
        self.base_address: int = self.memory.ctypes.data
        self.generation = generation
        self.slot_bytes = fingerprint.slot_bytes
        self.fingerprint = fingerprint

    def offset_bytes(self, slot: Slot, layer: int = 0, part: int = 0) -> int:
        """Where in the pool the run of one layer and part of ``slot`` begins.

        Raises:
            StoreUnavailableError: The slot is of another generation: its memory is gone.
        """
        if slot.generation != self.generation:
            raise StoreUnavailableError("the slot belongs to a pool that is gone")
        return slot.index * self.slot_bytes + self.fingerprint.offset_bytes(layer, part)

    def populate_in_background(self) -> None:
        """Fill this process's page tables from a thread, so that copies meet no page faults."""
        threading.Thread(
            target=_populate_quietly, args=(self.memory,), name="kvstore-populate", daemon=True
        ).start()


def map_memory(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map a file shared and writable; unmapped when the last reference to the array goes."""
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)


def populate(memory: npt.NDArray[np.uint8]) -> None:
    """Make every page of ``memory`` present and mapped for writing, without changing its bytes.

    Raises:
        OSError: There is not enough memory.
    """
    if not linux.populate(memory.ctypes.data, memory.size):
        # Or-ing with zero dirties a page and keeps what is in it.
        memory[::PAGE_BYTES] |= 0


def _populate_quietly(memory: npt.NDArray[np.uint8]) -> None:
    try:
        populate(memory)
    except OSError:
        return
