"""Calls of other threads, carried out by the daemon's, which alone knows the index."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.mailbox import Mailbox

ANSWER_S = 5.0
"""Longest wait for the daemon's thread."""
T = TypeVar("T")


class DaemonCalls:
    """A queue of calls.

    Args:
        selector: Of the thread that carries them out.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._calls: Mailbox[tuple[Callable[[], Any], Future[Any]]] = Mailbox()
        selector.register(self._calls.fd, selectors.EVENT_READ, self._on_calls)

    def call(self, act: Callable[[], T]) -> T:
        """The result of ``act``, which is raised where it raises.

        Raises:
            StoreUnavailableError: The daemon's thread has not come to it in time.
        """
        future = self.submit(act)
        try:
            return future.result(ANSWER_S)
        except TimeoutError:
            # What has begun meanwhile may have lent a block: its end is near.
            if not future.cancel():
                return future.result()
            raise StoreUnavailableError("the store has not answered in time") from None

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Have ``act`` done, without waiting."""
        future: Future[T] = Future()
        self._calls.put((act, future))
        return future

    def close(self) -> None:
        """Answer nothing any more; whoever waits hears that the store has gone."""
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
