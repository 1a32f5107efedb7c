"""Queue between two threads, for which a selector can wait."""

from __future__ import annotations

import contextlib
import os
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queue from one thread to another. ``fd`` is readable when the queue may hold items."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: SimpleQueue[T] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Return whether the queue holds no item."""
        return self._queue.empty()

    def put(self, item: T) -> None:
        """Add an item and make ``fd`` readable."""
        self._queue.put(item)
        self.knock()

    def knock(self) -> None:
        """Make ``fd`` readable."""
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        """Remove and return all items in order; ``fd`` stays as it is."""
        found: list[T] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found

    def calm(self) -> None:
        """Make ``fd`` unreadable. Call it before ``take``, so that no item is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close ``fd``."""
        os.close(self.fd)
