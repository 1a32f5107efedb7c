"""Effects of slot changes: board, freed memory, checksums, write-behind."""

from __future__ import annotations

import logging

import xxhash

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering import Tiering
from banaserve.kvstore.pool import Board
from banaserve.kvstore.records import IndexEntry

log = logging.getLogger(__name__)


class PoolWatcher:
    """Carries the index's decisions over to memory, clients and tiers.

    Args:
        board: Tells clients which slots are readable.
        tiering: Gets what becomes readable.
        poisons: Whether freed slots are overwritten.
        verifies: Whether slots get a checksum when they become readable.
    """

    def __init__(
        self, board: Board, tiering: Tiering, *, poisons: bool = False, verifies: bool = False
    ) -> None:
        self.num_corrupt = 0
        self.verifies = verifies
        self._board = board
        self._tiering = tiering
        self._poisons = poisons

    def carve(self, carved: CarvedPool) -> None:
        """The pool is cut into slots of another size; every slot is free."""
        self._carved = carved
        self._board.clear()
        if self._poisons:
            carved.pool.poison(0, carved.pool.num_bytes)

    def became_pending(self, entry: IndexEntry) -> None:
        """A tier is about to fill the slot."""
        self._board.show_pending(entry.slot, entry.serial)

    def became_ready(self, entry: IndexEntry) -> None:
        """The slot may be leased."""
        if self.verifies:
            entry.checksum = self._checksum(entry)
        self._board.show_ready(entry.slot, entry.serial)
        self._tiering.became_ready(entry)

    def failed(self, entry: IndexEntry) -> None:
        """The block in the slot is lost to its leases."""
        self._board.show_failed(entry.slot, entry.serial)
        self._tiering.left_memory(entry)

    def became_free(self, entry: IndexEntry) -> None:
        """The slot is not in use any more."""
        self._board.show_free(entry.slot)
        self._tiering.left_memory(entry)
        if self._poisons:
            carved = self._carved
            carved.pool.poison(entry.slot * carved.slot_bytes, carved.slot_bytes)

    def is_intact(self, entry: IndexEntry) -> bool:
        """Whether a READY slot holds the bytes that it held when it became READY."""
        if self._checksum(entry) == entry.checksum:
            return True
        self.num_corrupt += 1
        log.error("dropped block %s: its memory has changed", entry.key.hex()[:16])
        return False

    def _checksum(self, entry: IndexEntry) -> int:
        return xxhash.xxh3_64_intdigest(self._carved.bytes_of(entry).data)
