"""Shared memory of the store: the pool that holds the blocks, and the board of readable slots.

The daemon creates both once; clients map them. Clients only read the board, which has one word for
each slot: the serial of the block that is readable in the slot.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.base.platform import linux
from banaserve.kvstore.fingerprint import PAGE_BYTES, Fingerprint
from banaserve.kvstore.index.records import MAX_SERIAL
from banaserve.kvstore.leases import Lookup, Slot
from banaserve.kvstore.sizes import format_size

Numbers = npt.NDArray[np.int64]
"""Numbers of an engine's blocks or the store's slots, ``[num]``."""
POOL_NAME = "banaserve-kvstore"
"""Name of the pool's mappings in /proc."""
POISON = 0xFF
_WORD_BYTES = 8
_PENDING = 1 << 62
# Seal after which no new mapping can be writable; fcntl has no name for it before Python 3.13.
_F_SEAL_FUTURE_WRITE = 0x10


class SlotPool:
    """Sealed memfd of fixed size. It has no name in any file system and ends with its last user."""

    def __init__(self, num_bytes: int) -> None:
        """Create the pool and fill its pages. Blocks for about half a second per GiB.

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
        try:
            self.fd = os.memfd_create(POOL_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, linux.SEALS)
            self._memory = map_memory(self.fd, self.num_bytes)
            if not linux.populate(self._memory.ctypes.data, self.num_bytes):
                self._memory[::PAGE_BYTES] = 0
        except OSError as error:
            raise UserError(f"cannot fill a pool of {format_size(num_bytes)}: {error}") from error

    def part(self, first_byte: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a view of a range; the pool's memory stays mapped while the view exists."""
        return self._memory[first_byte : first_byte + num_bytes]

    def poison(self, first_byte: int, num_bytes: int) -> None:
        """Overwrite a range, so that a read of freed memory is noticed."""
        self._memory[first_byte : first_byte + num_bytes] = POISON

    def close(self) -> None:
        """Release the pool. Clients keep their mappings."""
        del self._memory
        os.close(self.fd)


class PoolView:
    """Mapping of the pool in a client. The memory stays mapped as long as this object exists.

    Attributes:
        memory: Bytes of the pool, ``[pool_bytes]`` uint8, shared with every other client.
        base_address: Address of ``memory`` in this process.
        slot_bytes: Size of a slot; slot ``i`` begins at ``base_address + i * slot_bytes``.
        generation: Generation of the slots in this view.
    """

    def __init__(self, fd: int, num_bytes: int, generation: int, fingerprint: Fingerprint) -> None:
        self.memory = map_memory(fd, num_bytes)
        self.base_address: int = self.memory.ctypes.data
        self.generation = generation
        self.slot_bytes = fingerprint.slot_bytes
        self.fingerprint = fingerprint

    def offset_bytes(self, slot: Slot, layer: int = 0, part: int = 0) -> int:
        """Return the offset in the pool of the run of one layer and part of ``slot``.

        Raises:
            StoreUnavailableError: The slot is of another generation: its memory is gone.
        """
        if slot.generation != self.generation:
            raise StoreUnavailableError("the slot belongs to a pool that is gone")
        return slot.index * self.slot_bytes + self.fingerprint.offset_bytes(layer, part)

    def populate_in_background(self) -> None:
        """Fill this process's page tables in a thread, so that copies cause no page faults.

        Only the kernel can: others write to the pool meanwhile. If it cannot, pages stay unmapped.
        """
        memory = self.memory

        def fill() -> None:
            with suppress(OSError):
                linux.populate(memory.ctypes.data, memory.size)

        threading.Thread(target=fill, name="kvstore-populate", daemon=True).start()


def map_memory(fd: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """Map a file shared and writable; it is unmapped with the array's last reference."""
    return np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8)


assert MAX_SERIAL < _PENDING


def board_bytes(pool_bytes: int) -> int:
    """Return the size of the board of a pool: a word for each slot of the smallest size."""
    num_words = pool_bytes // PAGE_BYTES
    return -(-num_words * _WORD_BYTES // PAGE_BYTES) * PAGE_BYTES


class Board:
    """Daemon's side of the board: a sealed memfd whose pages are allocated at a slot's first use.

    A word is the serial of the block that is readable in the slot, that serial with a mark while
    the block is on its way, or 0 if the slot holds no block that is or will be readable.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.num_bytes = board_bytes(pool_bytes)
        self.fd = os.memfd_create("banaserve-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        self._words = memoryview(self._map).cast("Q")
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        # Linux before 5.1 refuses: clients map the board for reading only, but are not forced to.
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)

    def show_ready(self, slot: int, serial: int) -> None:
        """Show that the block is readable."""
        self._words[slot] = serial

    def show_pending(self, slot: int, serial: int) -> None:
        """Show that the block is on its way."""
        self._words[slot] = serial | _PENDING

    def show_none(self, slot: int) -> None:
        """Show that the slot is free, or that its block will not arrive."""
        self._words[slot] = 0

    def clear(self) -> None:
        """Mark every slot as free. No slot may be in use."""
        self._map[:] = bytes(self.num_bytes)

    def close(self) -> None:
        """Release the memory. Clients keep their mappings."""
        self._words.release()
        self._map.close()
        os.close(self.fd)


class BoardView:
    """Read-only mapping of the board in a client. Thread-safe."""

    def __init__(self, fd: int, pool_bytes: int, generation: int) -> None:
        self.generation = generation
        self._map = mmap.mmap(fd, board_bytes(pool_bytes), mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    def states(self, slots: Sequence[Slot]) -> list[Lookup]:
        """Return HIT if a slot's block is readable, PENDING if it is on its way, else MISS."""
        words = self._words
        return [
            _state(words[slot.index], slot.serial)
            if slot.generation == self.generation
            else Lookup.MISS
            for slot in slots
        ]


def _state(word: int, serial: int) -> Lookup:
    if word == serial:
        return Lookup.HIT
    return Lookup.PENDING if word == serial | _PENDING else Lookup.MISS
