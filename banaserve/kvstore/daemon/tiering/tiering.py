"""Tiers below the pool, attached to the daemon's loop: promotions and write-behind."""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Sequence
from functools import partial

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier
from banaserve.kvstore.daemon.tiering.demoter import Demoter
from banaserve.kvstore.daemon.tiering.promoter import Promoter
from banaserve.kvstore.mailbox import Mailbox

log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
NOTE_EVERY_S = 5.0
"""Interval in seconds at which tiers are checked; a tier that is out of service for less, for
instance at its start, may go unlogged."""
HUNG_AFTER_S = 60.0
"""Duration of a load in seconds after which a tier counts as hung: far beyond its own timeouts."""


class Tiering:
    """Promotions and demotions of one pool. One thread calls all methods.

    Args:
        tiers: Tiers, fastest first.
        carved: Pool of the blocks.
        selector: Selector for the tiers' file descriptors; the data of its keys are functions that
            take the event mask.
        clock: Monotonic clock, in seconds.

    Attributes:
        tiers: Tiers, fastest first.
        promoter: Promoter of blocks into the pool.
        demoter: Writer of blocks to the tiers.
    """

    def __init__(
        self,
        tiers: Sequence[AttachedTier],
        carved: CarvedPool,
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.promoter = Promoter(tiers, carved, clock)
        self.demoter = Demoter(tiers, carved)
        self.tiers = tiers
        self._clock = clock
        self._selector = selector
        self._carved = carved
        self._num_closing = 0
        self._note_at_s = clock() + NOTE_EVERY_S
        self._closed: Mailbox[tuple[AttachedTier, bool]] = Mailbox()
        selector.register(self._closed.fd, READ, self._on_closed)
        for tier in tiers:
            if tier.is_open:
                selector.register(tier.fd, READ, partial(self._on_ended, tier))

    @property
    def has_tiers(self) -> bool:
        """Return whether there is any tier, in service or not."""
        return bool(self.tiers)

    @property
    def num_pending(self) -> int:
        """Number of copies that are under way or waiting."""
        return sum(
            len(tier.waiting) + len(tier.loading) + len(tier.storing) + len(tier.backlog)
            for tier in self.tiers
        )

    def pump(self) -> None:
        """Submit the transfers that the tiers accept now; cheap if there is nothing to do."""
        for tier in self.tiers:
            if tier.is_faulty:
                self._desert(tier)
            if tier.waiting:
                self.promoter.pump(tier)
            if tier.backlog:
                self.demoter.pump(tier)

        now_s = self._clock()
        if now_s >= self._note_at_s:
            self._note_at_s = now_s + NOTE_EVERY_S
            for tier in self.tiers:
                tier.note_state()
                self._watch(tier, now_s)

    def settle(self, timeout_s: float) -> bool:
        """Cancel copies that no tier has accepted, await the others; return whether all ended."""
        for tier in self.tiers:
            tier.backlog.clear()
        self.promoter.cancel_waiting()
        return self._wait(lambda: not any(tier.is_busy for tier in self.tiers), timeout_s)

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
                self.demoter.end(tier, entry, completion.outcome)

    def _watch(self, tier: AttachedTier, now_s: float) -> None:
        oldest_s = tier.oldest_load_s()
        if tier.is_open and oldest_s is not None and now_s - oldest_s > HUNG_AFTER_S:
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
