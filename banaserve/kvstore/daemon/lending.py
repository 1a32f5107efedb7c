"""Blocks of the pool for the threads that serve peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from banaserve.kvstore.daemon.calls import DaemonCalls
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.peers.messages import OfferPush
from banaserve.kvstore.peers.reception import Reception
from banaserve.kvstore.tiers.interface import BlockBytes


class Lending:
    """Lends blocks to peers, and takes theirs; see ``BlockSource`` and ``BlockSink``.

    Args:
        service: Whose blocks. Its own thread alone calls it.
        calls: Of that thread.
    """

    def __init__(self, service: StoreService, calls: DaemonCalls) -> None:
        self._service = service
        self._calls = calls

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key: hit, miss, or pending where it is being written."""
        return self._calls.call(lambda: self._service.lendable(keys))

    @contextmanager
    def lent(self, key: bytes, num_bytes: int) -> Iterator[BlockBytes | None]:
        """The bytes of a block, which stay while the context lasts; None where it is not there."""
        loan = self._calls.call(lambda: self._service.lend(key, num_bytes))
        if loan is None:
            yield None
            return
        try:
            yield loan.memory
        finally:
            self._calls.submit(lambda: self._service.take_back(loan))

    def accept(self, offer: OfferPush) -> Reception:
        """Slots for those blocks of an offer that are not here and have room."""
        return self._calls.call(lambda: self._service.receiving.accept(offer))

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Let blocks be read that have come, and give others up."""
        self._calls.submit(lambda: self._service.receiving.end(reception, done, failed))

    def end_hold(self, hold: int, reader: int | None) -> None:
        """Keep blocks no longer for a decode leg that has read them; None for all."""
        self._calls.submit(lambda: self._service.end_hold(hold, reader))
