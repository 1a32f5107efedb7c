"""Calls of other threads, run in the daemon's thread, which alone accesses the index."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from banaserve.base.errors import StoreUnavailableError
from banaserve.kvstore.mailbox import Mailbox

ANSWER_S = 5.0
"""Maximum wait for the daemon's thread, in seconds."""
T = TypeVar("T")


class DaemonCalls:
    """Queue of calls to the daemon's thread.

    Args:
        selector: Selector of the thread that runs the calls.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._calls: Mailbox[tuple[Callable[[], Any], Future[Any]]] = Mailbox()
        selector.register(self._calls.fd, selectors.EVENT_READ, self._on_calls)

    def call(self, act: Callable[[], T]) -> T:
        """Run ``act`` in the daemon's thread and return its result, or raise its exception.

        Raises:
            StoreUnavailableError: The daemon's thread has not begun the call in time.
        """
        future = self.submit(act)
        try:
            return future.result(ANSWER_S)
        except TimeoutError:
            # A call that has begun meanwhile may have lent a block; it ends soon.
            if not future.cancel():
                return future.result()
            raise StoreUnavailableError("the store has not answered in time") from None

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Queue ``act`` to be run in the daemon's thread, without waiting."""
        future: Future[T] = Future()
        self._calls.put((act, future))
        return future

    def close(self) -> None:
        """Stop running calls; cancel those that wait."""
        self._selector.unregister(self._calls.fd)
        for _, future in self._calls.take():
            future.cancel()

    def _on_calls(self, _events: int) -> None:
        self._calls.calm()
        for act, future in self._calls.take():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)
