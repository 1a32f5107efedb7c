"""Access to the pool's blocks for the threads that serve peers."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from banaserve.base.errors import StoreUnavailableError
from banaserve.kvstore.daemon.pushes.receiving import Reception
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.mailbox import Mailbox
from banaserve.kvstore.peers.messages import OfferPush
from banaserve.kvstore.tiers.interface import BlockBytes

ANSWER_S = 5.0
"""Maximum wait for the daemon's thread, in seconds."""
T = TypeVar("T")


class PoolAccess:
    """Lender of blocks to peers and receiver of theirs. Any thread may call.

    Each call is run in the daemon's thread, which alone accesses the index. A method that returns
    something waits for it, and raises StoreUnavailableError if the daemon's thread has not begun
    the call in time; the others do not wait.

    Args:
        service: Service that owns the blocks.
        selector: Selector of the daemon's thread.
    """

    def __init__(self, service: StoreService, selector: selectors.BaseSelector) -> None:
        self._service = service
        self._selector = selector
        self._calls: Mailbox[tuple[Callable[[], Any], Future[Any]]] = Mailbox()
        selector.register(self._calls.fd, selectors.EVENT_READ, self._on_calls)

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return which keys can be lent; not those in tiers, since each store has its own tiers.

        PENDING: the block is being written.
        """
        return self._call(lambda: self._service.index.lookup(keys))

    @contextmanager
    def lent(self, key: bytes, num_bytes: int) -> Iterator[BlockBytes | None]:
        """Lend the bytes of a block, which stay while the context lasts; None if it is absent."""
        block = self._call(lambda: self._service.lend(key, num_bytes))
        if block is None:
            yield None
            return
        try:
            yield block.memory
        finally:
            self._submit(lambda: self._service.take_back(block))

    def accept(self, offer: OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are not in the pool, if there is room."""
        return self._call(lambda: self._service.receiving.accept(offer))

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the ``done`` blocks readable, and drop the ``failed`` ones."""
        self._submit(lambda: self._service.receiving.end(reception, done, failed))

    def end_hold(self, hold: int, reader: int | None) -> None:
        """End a hold for a decode leg that has read its blocks; None for all legs."""
        self._submit(lambda: self._service.index.end_hold(hold, reader))

    def close(self) -> None:
        """Stop running calls; cancel those that wait."""
        self._selector.unregister(self._calls.fd)
        for _, future in self._calls.take():
            future.cancel()

    def _call(self, act: Callable[[], T]) -> T:
        future = self._submit(act)
        try:
            return future.result(ANSWER_S)
        except TimeoutError:
            # A call that has begun meanwhile may have lent a block; it ends soon.
            if not future.cancel():
                return future.result()
            raise StoreUnavailableError("the store has not answered in time") from None

    def _submit(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((act, future))
        return future

    def _on_calls(self, _events: int) -> None:
        self._calls.calm()
        for act, future in self._calls.take():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)
