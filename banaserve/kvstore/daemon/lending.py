"""Blocks of the pool for threads beside the daemon's, which alone knows the index."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.mailbox import Mailbox
from banaserve.kvstore.tiers.interface import BlockBytes

ANSWER_S = 5.0
"""Longest wait for the daemon's thread."""
T = TypeVar("T")


class Lending:
    """Lends blocks to peers; see ``peers.door.BlockSource``.

    Args:
        service: Whose blocks. Its own thread alone calls it.
        selector: Of that thread.
    """

    def __init__(self, service: StoreService, selector: selectors.BaseSelector) -> None:
        self._service = service
        self._selector = selector
        self._calls: Mailbox[tuple[Callable[[], Any], Future[Any]]] = Mailbox()
        selector.register(self._calls.fd, selectors.EVENT_READ, self._on_calls)

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key: hit, miss, or pending where it is being written."""
        return self._call(lambda: self._service.lendable(keys))

    @contextmanager
    def lent(self, key: bytes, num_bytes: int) -> Iterator[BlockBytes | None]:
        """The bytes of a block, which stay while the context lasts; None where it is not there."""
        loan = self._call(lambda: self._service.lend(key, num_bytes))
        if loan is None:
            yield None
            return
        try:
            yield loan.memory
        finally:
            self._submit(lambda: self._service.take_back(loan))

    def close(self) -> None:
        """Answer nothing any more; whoever waits hears that the store has gone."""
        self._selector.unregister(self._calls.fd)
        for _, future in self._calls.take():
            future.cancel()

    def _call(self, act: Callable[[], T]) -> T:
        future = self._submit(act)
        try:
            return future.result(ANSWER_S)
        except TimeoutError:
            # What has begun meanwhile may have lent a block: its end is near.
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
