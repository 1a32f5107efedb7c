"""Write-behind of blocks: each block that becomes readable is written to every tier without it."""

from __future__ import annotations

from collections.abc import Sequence

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockName, TierOutcome

MAX_BACKLOG_BLOCKS = 65536
"""Maximum number of blocks waiting to be written to one tier; beyond it the oldest are dropped."""
MAX_STORING_FRACTION = 0.125
"""Maximum fraction of the slots that writes to one tier may keep from eviction at a time."""
MAX_STORING_BYTES = 64 * 2**20
"""Maximum total size of the blocks that one tier writes at a time."""


class Demoter:
    """Writer of blocks to the tiers, by each tier's backlog.

    Args:
        tiers: Tiers to which blocks are written.
        carved: Pool of the blocks.
    """

    def __init__(self, tiers: Sequence[AttachedTier], carved: CarvedPool) -> None:
        self._tiers = tiers
        self._carved = carved

    def became_ready(self, entry: IndexEntry, source: AttachedTier | None) -> None:
        """Queue a block for every tier except its ``source``."""
        for tier in self._tiers:
            if tier is source or not tier.is_open or not tier.takes_blocks:
                continue
            tier.backlog[entry.serial] = entry
            if len(tier.backlog) > MAX_BACKLOG_BLOCKS:
                tier.forget(next(iter(tier.backlog)))

    def left_memory(self, entry: IndexEntry) -> None:
        """Remove a block whose bytes are gone from the backlogs."""
        for tier in self._tiers:
            tier.forget(entry.serial)

    def pump(self, tier: AttachedTier) -> None:
        """Submit the writes that ``tier`` accepts now, as far as promotions leave room for them."""
        num_slots, slot_bytes = self._carved.index.num_slots, self._carved.slot_bytes
        most = max(1, min(int(num_slots * MAX_STORING_FRACTION), MAX_STORING_BYTES // slot_bytes))
        while tier.backlog and not tier.waiting and len(tier.storing) < most:
            # While blocks are being promoted, one write at a time keeps the backlog moving.
            if tier.loading and tier.storing:
                return
            if not self._submit(tier, *next(iter(tier.backlog.items()))):
                return

    def _submit(self, tier: AttachedTier, serial: int, entry: IndexEntry) -> bool:
        """Submit a write; return whether to go on with the next block."""
        if not self._carved.index.verify(entry):
            return True
        ticket = tier.submit_store(BlockName(entry.key, entry.parent), self._carved.bytes_of(entry))
        if ticket is not None:
            del tier.backlog[serial]
            tier.storing[ticket] = entry
            self._carved.index.pin(entry)
            return True
        if tier.lookup([entry.key]) == [Lookup.HIT]:
            tier.backlog.pop(serial, None)
            return True
        if not tier.is_busy and serial in tier.backlog:
            # The tier is idle, so its queue is not full: begin with another block next time.
            tier.backlog[serial] = tier.backlog.pop(serial)
        return False

    def end(self, tier: AttachedTier, entry: IndexEntry, outcome: TierOutcome) -> None:
        """Finish a write that has ended and was removed from ``tier.storing``."""
        if outcome is TierOutcome.DONE:
            tier.counters.demoted += 1
        else:
            tier.counters.demotion_failures += 1
        self._carved.index.unpin(entry)
