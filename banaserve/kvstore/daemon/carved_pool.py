"""Pool cut into slots of the clients' block size, with the index and the board of these slots."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

import xxhash

from banaserve.base.config.serve_config import KEPT_QUOTA
from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import IndexEntry, SlotWatcher
from banaserve.kvstore.pool import Board, SlotPool
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.tiers.interface import BlockBytes

log = logging.getLogger(__name__)

MAX_PROMOTING_FRACTION = 0.5
"""Maximum fraction of the slots that tiers and pushes may fill at a time: the rest is left to
writers."""


class CarvedPool(SlotWatcher):
    """Memory of the blocks, which all parts of the daemon share, with its index and its board.

    It is the watcher of its index: it applies each change of a slot to memory and board.

    Args:
        tenant_quota: Largest share of the slots that one tenant may use; 1 sets no limit.
        kept_quota: Largest share of the slots that requests may keep, see ``BlockIndex``.
        poisons: True to overwrite freed slots.
        verifies: True to compute a checksum of each slot that becomes readable.

    Attributes:
        index: Index of the slots. It is replaced when the pool is cut anew, which happens only
            while no block is copied, lent or pushed.
        slot_bytes: Size of a slot; 0 until the first client has set it.
        generation: Generation of the slots; 0 until the first client has set their size.
        on_ready: Callback with a block that has become readable.
        on_gone: Callback with a block whose bytes are gone.
    """

    def __init__(
        self,
        pool: SlotPool,
        board: Board,
        *,
        tenant_quota: float = 1.0,
        kept_quota: float = KEPT_QUOTA,
        poisons: bool = False,
        verifies: bool = False,
    ) -> None:
        self.pool = pool
        self.index = BlockIndex(0)
        self.slot_bytes = self.generation = self.num_corrupt = 0
        self.on_ready: Callable[[IndexEntry], None] = lambda _: None
        self.on_gone: Callable[[IndexEntry], None] = lambda _: None
        self._board = board
        self._quotas = tenant_quota, kept_quota
        self._poisons = poisons
        self._verifies = verifies

    def bytes_of(self, entry: IndexEntry) -> BlockBytes:
        """Return the memory of the entry's slot, ``[slot_bytes]`` uint8."""
        return self.pool.part(entry.slot * self.slot_bytes, self.slot_bytes)

    def promote(self, key: bytes, parent: bytes | None, tenant: bytes) -> IndexEntry | None:
        """Give ``key`` a slot to fill, see ``BlockIndex.promote``; None also at the maximum."""
        if self.index.num_promoting >= max(1, int(self.index.num_slots * MAX_PROMOTING_FRACTION)):
            return None
        return self.index.promote(key, parent, tenant)

    def carve(self, slot_bytes: int) -> None:
        """Cut the pool into slots of ``slot_bytes``, all free, of a new generation."""
        num_slots = self.pool.num_bytes // slot_bytes
        # 63 bits: a msgpack integer that every language reads; never 0, which means "no pool".
        self.generation = secrets.randbelow(2**63 - 1) + 1
        self.slot_bytes = slot_bytes
        is_intact = self._is_intact if self._verifies else None
        tenant_quota, kept_quota = self._quotas
        self.index = BlockIndex(
            num_slots, self, self.index.counters, tenant_quota, is_intact, kept_quota
        )
        self._board.clear()
        if self._poisons:
            self.pool.poison(0, self.pool.num_bytes)
        log.info("%d slots of %s", num_slots, format_size(slot_bytes))

    def became_pending(self, entry: IndexEntry) -> None:
        """Show that a tier or a peer is about to fill the slot."""
        self._board.show_pending(entry.slot, entry.serial)

    def became_ready(self, entry: IndexEntry) -> None:
        """Show that the slot may be leased."""
        if self._verifies:
            entry.checksum = self._checksum(entry)
        self._board.show_ready(entry.slot, entry.serial)
        self.on_ready(entry)

    def failed(self, entry: IndexEntry) -> None:
        """Show that the block in the slot is lost to its leases."""
        self._board.show_none(entry.slot)
        self.on_gone(entry)

    def became_free(self, entry: IndexEntry) -> None:
        """Show that the slot is free, and overwrite it if that is enabled."""
        self._board.show_none(entry.slot)
        self.on_gone(entry)
        if self._poisons:
            self.pool.poison(entry.slot * self.slot_bytes, self.slot_bytes)

    def _is_intact(self, entry: IndexEntry) -> bool:
        if self._checksum(entry) == entry.checksum:
            return True
        self.num_corrupt += 1
        log.error("dropped block %s: its memory has changed", entry.key.hex()[:16])
        return False

    def _checksum(self, entry: IndexEntry) -> int:
        return xxhash.xxh3_64_intdigest(self.bytes_of(entry).data)
