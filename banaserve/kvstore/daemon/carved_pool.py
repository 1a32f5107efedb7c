"""Pool cut into slots of the clients' block size, with the index of these slots."""

from __future__ import annotations

from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.pool import SlotPool
from banaserve.kvstore.tiers.interface import BlockBytes


class CarvedPool:
    """Memory of the blocks and its index, which all parts of the daemon share.

    Attributes:
        index: Index of the slots. It is replaced when the pool is cut anew, which happens only
            while no block is copied, lent or pushed.
        slot_bytes: Size of a slot; 0 until the first client has set it.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self.index = BlockIndex(0)
        self.slot_bytes = 0

    def bytes_of(self, entry: IndexEntry) -> BlockBytes:
        """Return the memory of the entry's slot, ``[slot_bytes]`` uint8."""
        return self.pool.part(entry.slot * self.slot_bytes, self.slot_bytes)
