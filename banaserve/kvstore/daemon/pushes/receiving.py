"""Reception of blocks that other machines' stores push into this one before a client asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.promoter import MAX_PROMOTING_FRACTION, Promoter
from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import HOLD_S, IndexEntry
from banaserve.kvstore.peers.messages import OfferPush
from banaserve.kvstore.peers.reception import Reception
from banaserve.kvstore.tiers.interface import BlockBytes


class Receiving:
    """Pushes to this store under way. One thread calls all methods.

    A pushed block is treated like one that a tier loads: it may be leased, and is readable only
    once its sender has committed it and all of its bytes have arrived.

    Args:
        promoter: Promoter, which predicts for readers how long to wait.
        clock: Monotonic clock, in seconds.

    Attributes:
        num_blocks: Number of blocks received.
    """

    def __init__(self, promoter: Promoter, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_blocks = 0
        self._promoter = promoter
        self._clock = clock
        self._carved: CarvedPool | None = None
        self._entries: dict[Reception, dict[int, IndexEntry]] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether slots are being written by pushes."""
        return bool(self._entries)

    def carve(self, carved: CarvedPool) -> None:
        """Switch to another pool geometry. No push may be under way."""
        assert not self._entries
        self._carved = carved

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are not in the pool, if there is room.

        An offer with a hold gets slots for all of its blocks or for none: of two prompts that each
        had a part of the room, neither would ever get the rest.
        """
        entries = dict(self._promoted(offer))
        if offer.hold and self._carved is not None and not self._hold(offer, self._carved.index):
            for entry in entries.values():
                self._carved.index.end_promotion(entry, filled=False)
            entries = {}
        memory: dict[int, BlockBytes] = {}
        if self._carved is not None:
            memory = {number: self._carved.bytes_of(entry) for number, entry in entries.items()}
        reception = Reception(offer, memory, self._clock())
        if entries:
            self._entries[reception] = entries
            for entry in entries.values():
                self._promoter.expect(entry, reception.left_s)
        return reception

    def _promoted(self, offer: OfferPush) -> list[tuple[int, IndexEntry]]:
        carved, found = self._carved, []
        if carved is None or offer.num_bytes != carved.slot_bytes:
            return []
        index, parent = carved.index, offer.first_parent
        most = max(1, int(index.num_slots * MAX_PROMOTING_FRACTION))
        for number, key in enumerate(offer.keys):
            if index.get(key) is None:
                if index.num_promoting >= most:
                    break
                entry = index.promote(key, parent, offer.tenant)
                if entry is None:
                    break
                found.append((number, entry))
            parent = key
        return found

    def _hold(self, offer: OfferPush, index: BlockIndex) -> bool:
        """Hold all blocks of ``offer``; False if one or its first parent is not in the pool."""
        before = [] if offer.first_parent is None else [offer.first_parent]
        if any(index.get(key) is None for key in (*before, *offer.keys)):
            return False
        now_s = self._clock()
        index.expire_holds(now_s)
        index.hold(offer.hold, offer.keys, now_s + HOLD_S, offer.num_readers)
        return True

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the ``done`` blocks of a push readable, and drop the ``failed`` ones."""
        entries = self._entries.get(reception)
        if entries is None or self._carved is None:
            return
        for numbers, filled in ((done, True), (failed, False)):
            for number in numbers:
                entry = entries.pop(number)
                self._promoter.expect(entry, None)
                self._carved.index.end_promotion(entry, filled=filled)
        self.num_blocks += len(done)
        if not entries:
            del self._entries[reception]
