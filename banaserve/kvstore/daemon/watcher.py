"""Effects of slot changes: board, freed memory, checksums, write-behind."""

from __future__ import annotations

import logging

import xxhash

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.tiering import Tiering
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.pool import Board

log = logging.getLogger(__name__)


class PoolWatcher:
    """Watcher that applies the index's decisions to memory, clients and tiers.

    Args:
        carved: Pool of the blocks.
        board: Board that shows clients which slots are readable.
        tiering: Tiers to which readable blocks are written.
        poisons: True to overwrite freed slots.
        verifies: True to compute a checksum of each slot that becomes readable.
    """

    def __init__(
        self,
        carved: CarvedPool,
        board: Board,
        tiering: Tiering,
        *,
        poisons: bool = False,
        verifies: bool = False,
    ) -> None:
        self.num_corrupt = 0
        self.verifies = verifies
        self._carved = carved
        self._board = board
        self._tiering = tiering
        self._poisons = poisons

    def clear(self) -> None:
        """Show that every slot is free, after the pool was cut into slots of another size."""
        self._board.clear()
        if self._poisons:
            self._carved.pool.poison(0, self._carved.pool.num_bytes)

    def became_pending(self, entry: IndexEntry) -> None:
        """Show that a tier or a peer is about to fill the slot."""
        self._board.show_pending(entry.slot, entry.serial)

    def became_ready(self, entry: IndexEntry) -> None:
        """Show that the slot may be leased, and queue its block for the tiers."""
        if self.verifies:
            entry.checksum = self._checksum(entry)
        self._board.show_ready(entry.slot, entry.serial)
        self._tiering.became_ready(entry)

    def failed(self, entry: IndexEntry) -> None:
        """Show that the block in the slot is lost to its leases."""
        self._board.show_failed(entry.slot, entry.serial)
        self._tiering.left_memory(entry)

    def became_free(self, entry: IndexEntry) -> None:
        """Show that the slot is free, and overwrite it if that is enabled."""
        self._board.show_free(entry.slot)
        self._tiering.left_memory(entry)
        if self._poisons:
            carved = self._carved
            carved.pool.poison(entry.slot * carved.slot_bytes, carved.slot_bytes)

    def is_intact(self, entry: IndexEntry) -> bool:
        """Return whether a READY slot still holds the bytes that it held when it became READY."""
        if self._checksum(entry) == entry.checksum:
            return True
        self.num_corrupt += 1
        log.error("dropped block %s: its memory has changed", entry.key.hex()[:16])
        return False

    def _checksum(self, entry: IndexEntry) -> int:
        return xxhash.xxh3_64_intdigest(self._carved.bytes_of(entry).data)
