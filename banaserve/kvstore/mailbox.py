"""A queue between two threads that a selector can wait for."""

from __future__ import annotations

import contextlib
import os
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue from one thread to another that a selector can wait for.

    Attributes:
        fd: Readable when something lies in it.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: SimpleQueue[T] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether nothing lies in it."""
        return self._queue.empty()

    def put(self, item: T) -> None:
        """Add an item and make ``fd`` readable."""
        self._queue.put(item)
        self.knock()

    def knock(self) -> None:
        """Make ``fd`` readable."""
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        """Everything in it, in order; ``fd`` stays as it is."""
        found: list[T] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found

    def calm(self) -> None:
        """Make ``fd`` unreadable. Call it before ``take``, so that nothing is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close ``fd``."""
        os.close(self.fd)
