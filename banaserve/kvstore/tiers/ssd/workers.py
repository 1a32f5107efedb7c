"""Threads for calls that block, with callbacks on the caller's thread."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """Threads that make calls; ``poll`` makes the callbacks.

    Args:
        num_threads: Maximum number of calls at a time; further calls wait.

    Attributes:
        fd: Eventfd, readable when ``poll`` may have something to do.
    """

    def __init__(self, num_threads: int) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ssd")
        self._ended: deque[Callable[[], None]] = deque()
        self._num_under_way = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no call is under way."""
        return not self._num_under_way

    def submit(self, call: Callable[[], T], then: Callable[[T | OSError], None]) -> None:
        """Make ``call``; ``then`` gets its result, or the OSError that it raised.

        Any other exception of ``call`` is raised by ``poll``.
        """
        self._num_under_way += 1
        self._threads.submit(call).add_done_callback(partial(self._end, then))

    def wake(self) -> None:
        """Make ``fd`` readable, so that ``poll`` is called again."""
        os.eventfd_write(self.fd, 1)

    def poll(self) -> None:
        """Make the callbacks of all calls that have ended."""
        # First: a call that ends later makes the descriptor readable again.
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._ended:
            self._num_under_way -= 1
            self._ended.popleft()()

    def finish(self) -> None:
        """Wait for all calls, make their callbacks, and stop. Blocks."""
        while not self.is_idle:
            select.select([self.fd], [], [])
            self.poll()
        self._threads.shutdown()
        os.close(self.fd)

    def _end(self, then: Callable[[T | OSError], None], future: Future[T]) -> None:
        self._ended.append(partial(_tell, then, future))
        self.wake()


def _tell(then: Callable[[T | OSError], None], future: Future[T]) -> None:
    try:
        result: T | OSError = future.result()
    except OSError as error:
        result = error
    then(result)
