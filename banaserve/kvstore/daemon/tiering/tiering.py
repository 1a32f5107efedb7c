"""Tiers below the pool, attached to the daemon's loop: write-behind, and the end of promotions.

Each block that becomes readable is written to every tier without it, by the tier's backlog.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier
from banaserve.kvstore.daemon.tiering.promoter import Promoter
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockName, TierOutcome
from banaserve.kvstore.tiers.mailbox import Mailbox

log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
NOTE_EVERY_S = 5.0
"""Interval in seconds at which tiers are checked; a tier that is out of service for less, for
instance at its start, may go unlogged."""
HUNG_AFTER_S = 60.0
"""Duration of a load in seconds after which a tier counts as hung: far beyond its own timeouts."""

MAX_BACKLOG_BLOCKS = 65536
"""Maximum number of blocks waiting to be written to one tier; beyond it the oldest are dropped."""
MAX_STORING_FRACTION = 0.125
"""Maximum fraction of the slots that writes to one tier may keep from eviction at a time."""
MAX_STORING_BYTES = 64 * 2**20
"""Maximum total size of the blocks that one tier writes at a time."""


class Tiering:
    """Promotions and demotions of one pool. One thread calls all methods.

    Args:
        tiers: Tiers, fastest first.
        carved: Pool of the blocks.
        selector: Selector for the tiers' file descriptors; the data of its keys are functions that
            take the event mask.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        tiers: Sequence[AttachedTier],
        carved: CarvedPool,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.promoter = Promoter(tiers, carved, clock)
        self.tiers = tiers
        self._clock = clock
        self._selector = selector
        self._carved = carved
        carved.on_ready, carved.on_gone = self._write_later, self._forget
        self._num_closing = 0
        self._note_at_s = clock() + NOTE_EVERY_S
        self._closed: Mailbox[tuple[AttachedTier, bool]] = Mailbox()
        selector.register(self._closed.fd, READ, self._on_closed)
        for tier in tiers:
            if tier.is_open:
                selector.register(tier.fd, READ, partial(self._on_ended, tier))

    @property
    def num_pending(self) -> int:
        """Number of copies that are under way or waiting."""
        return sum(
            len(tier.waiting) + len(tier.loading) + len(tier.storing) + len(tier.backlog)
            for tier in self.tiers
        )

    def _write_later(self, entry: IndexEntry) -> None:
        """Queue a readable block for every tier except the one that it was read from."""
        source = self.promoter.source_of(entry)
        for tier in self.tiers:
            if tier is source or not tier.is_open or not tier.takes_blocks:
                continue
            tier.backlog[entry.serial] = entry
            if len(tier.backlog) > MAX_BACKLOG_BLOCKS:
                tier.forget(next(iter(tier.backlog)))

    def _forget(self, entry: IndexEntry) -> None:
        """Remove a block whose bytes are gone from the backlogs."""
        for tier in self.tiers:
            tier.forget(entry.serial)

    def pump(self) -> None:
        """Submit the transfers that the tiers accept now; cheap if there is nothing to do."""
        for tier in self.tiers:
            if tier.is_faulty:
                self._desert(tier)
            if tier.waiting:
                self.promoter.pump(tier)
            if tier.backlog:
                self._write_behind(tier)

        now_s = self._clock()
        if now_s >= self._note_at_s:
            self._note_at_s = now_s + NOTE_EVERY_S
            for tier in self.tiers:
                tier.note_state()
                self._watch(tier, now_s)

    def settle(self, timeout_s: float) -> bool:
        """Cancel copies that no tier has accepted, await the others; return whether all ended."""
        self.promoter.cancel_waiting()
        self._drop_backlogs()
        have_ended = self._wait(lambda: not any(tier.is_busy for tier in self.tiers), timeout_s)
        self._drop_backlogs()  # a load that has ended meanwhile put its block into other backlogs
        return have_ended

    def _drop_backlogs(self) -> None:
        for tier in self.tiers:
            tier.backlog.clear()

    def drain(self, timeout_s: float) -> bool:
        """Write the backlogs to the tiers; return whether all was written in time."""
        self.promoter.cancel_waiting()
        return self._wait(lambda: not self.num_pending, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close every tier; do not wait longer than ``timeout_s`` for a tier that does not end."""
        self._selector.unregister(self._closed.fd)
        threads = []
        for tier in self.tiers:
            if tier.is_open or tier.is_faulty:
                self._unregister(tier)
                threads.append(tier.close_in_background(lambda _: None))
        deadline_s = self._clock() + timeout_s
        for thread in threads:
            if thread.is_alive():  # it may not even have started
                thread.join(max(0.0, deadline_s - self._clock()))
            if thread.is_alive():
                log.error("left a tier behind that did not close in %g s", timeout_s)
        if not self._num_closing:
            self._closed.close()

    def _wait(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = self._clock() + timeout_s
        with selectors.DefaultSelector() as selector:
            for key in self._selector.get_map().values():
                if key.fd == self._closed.fd or any(key.fd == t.fd for t in self.tiers):
                    selector.register(key.fd, READ, key.data)
            self.pump()
            while not is_over() and (left_s := deadline_s - self._clock()) > 0:
                for key, events in selector.select(min(left_s, 0.1)):
                    key.data(events)
                self.pump()
        return is_over()

    def _on_ended(self, tier: AttachedTier, _events: int) -> None:
        for completion in tier.poll():
            if (load := tier.loading.pop(completion.ticket, None)) is not None:
                self.promoter.end(tier, load, completion.outcome)
            elif (entry := tier.storing.pop(completion.ticket, None)) is not None:
                self._end_store(tier, entry, completion.outcome)

    def _write_behind(self, tier: AttachedTier) -> None:
        """Submit the writes that ``tier`` accepts now, as far as promotions leave room for them."""
        num_slots, slot_bytes = self._carved.index.num_slots, self._carved.slot_bytes
        most = max(1, min(int(num_slots * MAX_STORING_FRACTION), MAX_STORING_BYTES // slot_bytes))
        while tier.backlog and not tier.waiting and len(tier.storing) < most:
            # While blocks are being promoted, one write at a time keeps the backlog moving.
            if tier.loading and tier.storing:
                return
            if not self._submit_store(tier, *next(iter(tier.backlog.items()))):
                return

    def _submit_store(self, tier: AttachedTier, serial: int, entry: IndexEntry) -> bool:
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

    def _end_store(self, tier: AttachedTier, entry: IndexEntry, outcome: TierOutcome) -> None:
        if outcome is TierOutcome.DONE:
            tier.counters.demoted += 1
        else:
            tier.counters.demotion_failures += 1
        self._carved.index.unpin(entry)

    def _watch(self, tier: AttachedTier, now_s: float) -> None:
        is_hung = any(now_s - load.taken_s > HUNG_AFTER_S for load in tier.loading.values())
        if tier.is_open and is_hung:
            tier.give_up(f"a load has not ended in {HUNG_AFTER_S:g} s")
            log.error("going on without the %s tier: %s", tier.name, tier.problem)
            self._desert(tier)

    def _desert(self, tier: AttachedTier) -> None:
        self._unregister(tier)
        tier.backlog.clear()
        self.promoter.desert(tier)
        self._num_closing += 1
        tier.close_in_background(lambda is_quiet: self._closed.put((tier, is_quiet)))

    def _on_closed(self, _events: int) -> None:
        self._closed.calm()
        for tier, is_quiet in self._closed.take():
            self._num_closing -= 1
            # A tier that may still be copying keeps its slots until the daemon ends.
            if not is_quiet:
                continue
            for load in tier.loading.values():
                self._carved.index.end_promotion(load.entry, filled=False)
            for entry in tier.storing.values():
                self._carved.index.unpin(entry)
            tier.loading.clear()
            tier.storing.clear()

    def _unregister(self, tier: AttachedTier) -> None:
        if tier.fd >= 0:
            self._selector.unregister(tier.fd)
            # The number of the file descriptor may soon be that of a new connection.
            tier.fd = -1
