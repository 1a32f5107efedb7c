"""The board: one word a slot that says which block is readable there. Clients only read it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.interface import Lookup, Slot
from banaserve.kvstore.records import MAX_SERIAL

_WORD_BYTES = 8
_FAILED = 1 << 63
_PENDING = 1 << 62
# fcntl does not name it before Python 3.13: no mapping made later can be written through.
_F_SEAL_FUTURE_WRITE = 0x10

assert MAX_SERIAL < _PENDING


def board_bytes(pool_bytes: int) -> int:
    """Size of the board of a pool: a word for each slot of the smallest size there is."""
    num_words = pool_bytes // PAGE_BYTES
    return -(-num_words * _WORD_BYTES // PAGE_BYTES) * PAGE_BYTES


class Board:
    """The daemon's side: a sealed memfd whose pages are only taken when a slot is first used.

    A word is the serial of the block that is readable in the slot, that serial with a mark while
    the block is on its way or after it has failed, or 0.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.num_bytes = board_bytes(pool_bytes)
        self.fd = os.memfd_create("banaserve-board", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.num_bytes)
        self._map = mmap.mmap(self.fd, self.num_bytes)
        self._words = memoryview(self._map).cast("Q")
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        try:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError:
            # Linux before 5.1: clients map it for reading, but nothing holds them to that.
            return

    def show_ready(self, slot: int, serial: int) -> None:
        """The block is readable."""
        self._words[slot] = serial

    def show_pending(self, slot: int, serial: int) -> None:
        """The block is on its way."""
        self._words[slot] = serial | _PENDING

    def show_failed(self, slot: int, serial: int) -> None:
        """The block will not come."""
        self._words[slot] = serial | _FAILED

    def show_free(self, slot: int) -> None:
        """Nothing lies in the slot."""
        self._words[slot] = 0

    def clear(self) -> None:
        """Every slot is free. Only while nobody holds a slot."""
        self._map[:] = bytes(self.num_bytes)

    def close(self) -> None:
        """Let go of the memory. Clients keep their mappings."""
        self._words.release()
        self._map.close()
        os.close(self.fd)


class BoardView:
    """A client's mapping of the board, for reading only. Safe from any thread."""

    def __init__(self, fd: int, pool_bytes: int, generation: int) -> None:
        self.generation = generation
        self._map = mmap.mmap(fd, board_bytes(pool_bytes), mmap.MAP_SHARED, mmap.PROT_READ)
        self._words = memoryview(self._map).cast("Q")

    def states(self, slots: Sequence[Slot]) -> list[Lookup]:
        """HIT where the slot's block is readable, PENDING while it is on its way, else MISS."""
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
