"""Slow operations in other threads: disk transfers, and calls that block.

Each operation ends with a callback, which ``poll`` calls on the caller's thread.
"""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from banaserve._native import DiskQueue
from banaserve.kvstore.tiers.interface import BlockBytes

log = logging.getLogger(__name__)
_Job = tuple[Callable[[], Any], Callable[[Any], None]]


def aligned_bytes(num_bytes: int) -> BlockBytes:
    """Return zeroed memory that starts at a page boundary, ``[num_bytes]``."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


class Worker:
    """Thread that makes calls sequentially.

    Args:
        name: Name of the thread.
        wake_fd: Eventfd to signal when a call has returned.
    """

    def __init__(self, name: str, wake_fd: int) -> None:
        self.num_under_way = 0
        self._wake_fd = wake_fd
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._ended: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Make ``call``; ``then`` gets its result, or the OSError that it raised.

        Any other exception of ``call`` is raised by ``poll``.
        """
        self.num_under_way += 1
        self._jobs.put((call, then))

    def poll(self) -> None:
        """Make the callbacks of calls that have ended."""
        while self._ended:
            then, result = self._ended.popleft()
            self.num_under_way -= 1
            if isinstance(result, Exception) and not isinstance(result, OSError):
                raise result
            then(result)

    def close(self) -> None:
        """Finish all submitted calls and wait for them."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, then = job
            try:
                result = call()
            except Exception as error:
                result = error
            # Not kept until the next job: a call may keep a block's memory alive.
            del job, call
            self._ended.append((then, result))
            os.eventfd_write(self._wake_fd, 1)
            del then, result


class BlockDevice:
    """Queue of one disk, with threads for checksums and for calls on files.

    Args:
        depth: Maximum number of transfers at a time.
        engine: Engine of the ``DiskQueue``.

    Attributes:
        fd: Eventfd, readable when ``poll`` may have something to do.
        loads: Thread for the calls of loads.
        stores: Thread for the calls of stores, and for deletions.
    """

    def __init__(self, depth: int, engine: str) -> None:
        self.queue = DiskQueue(depth, engine)
        if self.queue.fallback_reason:
            log.warning("the SSD tier uses threads: %s", self.queue.fallback_reason)
        self.fd = self.queue.fd
        # Two, so that loads do not wait while a file is created or deleted.
        self.loads = Worker("ssd-loads", self.fd)
        self.stores = Worker("ssd-stores", self.fd)
        self._transfers: dict[int, tuple[Callable[[int], None], Sequence[BlockBytes]]] = {}
        self._last_tag = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no transfer and no call is under way."""
        num_calls = self.loads.num_under_way + self.stores.num_under_way
        return not num_calls and not self._transfers

    def read(
        self, fd: int, offset: int, parts: Sequence[BlockBytes], then: Callable[[int], None]
    ) -> None:
        """Fill ``parts`` from a file; ``then`` gets the number of bytes or -errno.

        The caller never has more than ``depth`` transfers under way.
        """
        self._begin(self.queue.submit_read, fd, offset, parts, then)

    def write(
        self, fd: int, offset: int, parts: Sequence[BlockBytes], then: Callable[[int], None]
    ) -> None:
        """Write ``parts`` to a file; otherwise like ``read``."""
        self._begin(self.queue.submit_write, fd, offset, parts, then)

    def wake(self) -> None:
        """Make ``fd`` readable, so that ``poll`` is called again."""
        os.eventfd_write(self.fd, 1)

    def poll(self) -> None:
        """Make the callbacks of all operations that have ended."""
        # First, because this resets the eventfd: an operation that ends later signals again.
        ended = self.queue.poll()
        for tag, result in ended:
            then, _ = self._transfers.pop(tag)
            then(result)
        self.loads.poll()
        self.stores.poll()

    def wait(self) -> None:
        """Block until ``poll`` has something to do. Not for event loops."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        poller.poll()

    def close(self) -> None:
        """Wait for all operations under way and stop the threads."""
        self.queue.close()
        self.loads.close()
        self.stores.close()

    def _begin(
        self,
        submit: Callable[[int, int, int, list[tuple[int, int]]], bool],
        fd: int,
        offset: int,
        parts: Sequence[BlockBytes],
        then: Callable[[int], None],
    ) -> None:
        self._last_tag += 1
        addresses = [(part.ctypes.data, part.nbytes) for part in parts]
        accepted = submit(self._last_tag, fd, offset, addresses)
        assert accepted, "more transfers than the queue has places"
        self._transfers[self._last_tag] = (then, parts)
