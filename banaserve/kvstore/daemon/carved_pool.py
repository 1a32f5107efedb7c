"""Pool and index of one geometry: the pool cut into slots."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.pool import SlotPool
from banaserve.kvstore.tiers.interface import BlockBytes


@dataclass(frozen=True, slots=True)
class CarvedPool:
    """Memory and index of one pool geometry."""

    pool: SlotPool
    index: BlockIndex
    slot_bytes: int

    def bytes_of(self, entry: IndexEntry) -> BlockBytes:
        """Return the memory of the entry's slot, ``[slot_bytes]`` uint8."""
        return self.pool.part(entry.slot * self.slot_bytes, self.slot_bytes)
