"""The disk queue beside threads that call the system themselves, past the page cache."""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from banaserve._native import DiskQueue
from banaserve.bench.kvstore_memory import plain_memory
from banaserve.errors import UserError


class QueueBench:
    """Blocks of one size in a file that is as long as all of them.

    Args:
        folder: On the disk to measure.
        block_bytes: A multiple of the page size.
        num_blocks: Of a run.
        depth: Transfers under way at once.
        seed: Of the bytes and of the order of blocks.
    """

    def __init__(
        self, folder: Path, block_bytes: int, num_blocks: int, depth: int, seed: int
    ) -> None:
        self._path = folder / f"banaserve-copies-{os.getpid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        self._fd = os.open(self._path, flags, 0o600)
        self._path.unlink()
        os.posix_fallocate(self._fd, 0, num_blocks * block_bytes)
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._depth = depth
        self._random = random.Random(seed)
        self._queue = DiskQueue(depth, "auto")
        self._memory = plain_memory(depth * block_bytes, seed).reshape(depth, block_bytes)

    @property
    def engine(self) -> str:
        """That moves the queue's bytes."""
        return self._queue.engine

    def close(self) -> None:
        """Let go of the disk."""
        self._queue.close()
        os.close(self._fd)

    def run(self) -> dict[str, float]:
        """Seconds by ``queue_write``, ``raw_write``, ``queue_read`` and ``raw_read``."""
        seconds = {}
        for writes in (True, False):
            order = self._random.sample(range(self._num_blocks), self._num_blocks)
            ways = [("queue", self._by_queue), ("raw", self._by_threads)]
            self._random.shuffle(ways)
            for name, way in ways:
                began_s = time.perf_counter()
                way(order, writes)
                seconds[f"{name}_{'write' if writes else 'read'}"] = time.perf_counter() - began_s
        return seconds

    def _by_threads(self, order: Sequence[int], writes: bool) -> None:
        move = os.pwritev if writes else os.preadv

        def work(worker: int) -> None:
            buffer = memoryview(self._memory[worker])
            for number in order[worker :: self._depth]:
                self._check(move(self._fd, [buffer], number * self._block_bytes))

        with ThreadPoolExecutor(self._depth) as pool:
            list(pool.map(work, range(self._depth)))

    def _by_queue(self, order: Sequence[int], writes: bool) -> None:
        submit = self._queue.submit_write if writes else self._queue.submit_read
        left, free, under_way = list(order), list(range(self._depth)), 0
        while left or under_way:
            while left and free:
                buffer = free.pop()
                place = (self._memory[buffer].ctypes.data, self._block_bytes)
                submit(buffer, self._fd, left.pop() * self._block_bytes, [place])
                under_way += 1
            if not select.select([self._queue.fd], [], [], 60.0)[0]:
                raise UserError("the disk does not answer")
            for buffer, result in self._queue.poll():
                self._check(result)
                free.append(buffer)
                under_way -= 1

    def _check(self, result: int) -> None:
        if result != self._block_bytes:
            raise UserError(f"the disk moved {result} of {self._block_bytes} bytes")
