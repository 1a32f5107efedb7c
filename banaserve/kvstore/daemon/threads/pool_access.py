"""Access to the pool's blocks for the threads that serve peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.daemon.threads.calls import DaemonCalls
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.peers.messages import OfferPush
from banaserve.kvstore.peers.reception import Reception
from banaserve.kvstore.tiers.interface import BlockBytes


class PoolAccess:
    """Lender of blocks to peers and receiver of theirs; see ``BlockSource`` and ``BlockSink``.

    Args:
        service: Service that owns the blocks. Only its own thread calls it.
        calls: Queue of calls to that thread.
    """

    def __init__(self, service: StoreService, calls: DaemonCalls) -> None:
        self._service = service
        self._calls = calls

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key: hit, miss, or pending if its block is being written."""
        return self._calls.call(lambda: self._service.lendable(keys))

    @contextmanager
    def lent(self, key: bytes, num_bytes: int) -> Iterator[BlockBytes | None]:
        """Lend the bytes of a block, which stay while the context lasts; None if it is absent."""
        block = self._calls.call(lambda: self._service.lend(key, num_bytes))
        if block is None:
            yield None
            return
        try:
            yield block.memory
        finally:
            self._calls.submit(lambda: self._service.take_back(block))

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are not in the pool, if there is room."""
        return self._calls.call(lambda: self._service.receiving.accept(offer))

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the received blocks readable, and drop the failed ones."""
        self._calls.submit(lambda: self._service.receiving.end(reception, done, failed))

    def end_hold(self, hold: int, reader: int | None) -> None:
        """End a hold for a decode leg that has read its blocks; None for all legs."""
        self._calls.submit(lambda: self._service.end_hold(hold, reader))
