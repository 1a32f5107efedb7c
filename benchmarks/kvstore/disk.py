"""SSD tier compared with raw direct I/O of the same blocks at the same depth on one disk."""

from __future__ import annotations

import mmap
import os
import random
import select
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.interface import BlockName, TierOutcome
from banaserve.kvstore.tiers.ssd.record import record_bytes
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from benchmarks.kvstore.memory import Memory, plain_memory


class DiskTimes(NamedTuple):
    """Seconds for the same number of blocks."""

    raw_write_s: float
    tier_write_s: float
    raw_read_s: float
    tier_read_s: float


class DiskBench:
    """Benchmark of blocks of one size, written and read past the page cache.

    Args:
        folder: Folder on the disk to measure; gets the tier's files and one raw file.
        block_bytes: Size of a block, a multiple of the page size.
        num_blocks: Number of blocks of a run.
        depth: Number of transfers under way at once.
        seed: Seed of the bytes and of the order of reads.

    Attributes:
        is_direct: True if the tier goes past the page cache.
    """

    def __init__(
        self, folder: Path, block_bytes: int, num_blocks: int, depth: int, seed: int
    ) -> None:
        self._block_bytes = block_bytes
        self._num_blocks = num_blocks
        self._depth = depth
        self._random = random.Random(seed)
        self._raw_path = folder / "raw"
        # The budget is used up after two runs: what counts is a tier that evicts as it stores.
        # The queue is twice as deep, since stores may use three quarters of it only.
        budget_bytes = 2 * num_blocks * record_bytes(block_bytes)
        self._tier = SsdTier(folder / "tier", budget_bytes, queue_depth=2 * depth)
        self.is_direct = self._tier.direct
        # One buffer for each transfer under way; the first bytes distinguish blocks.
        self._memory = plain_memory(depth * block_bytes, seed).reshape(depth, block_bytes)
        self._last_key = 0

    def close(self) -> None:
        """Close the tier and remove the raw file."""
        self._tier.close()
        self._raw_path.unlink(missing_ok=True)

    def run(self, tier_first: bool) -> DiskTimes:
        """Write blocks in both ways, then read them in both ways, in random order."""
        keys = [
            number.to_bytes(32, "big")
            for number in range(self._last_key, self._last_key + self._num_blocks)
        ]
        self._last_key += self._num_blocks
        order = self._random.sample(range(self._num_blocks), self._num_blocks)

        def store(number: int, buffer: Memory) -> int | None:
            return self._tier.submit_store(BlockName(keys[number], None), buffer)

        def load(number: int, buffer: Memory) -> int | None:
            return self._tier.submit_load(keys[number], buffer)

        self._raw_path.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        fd = os.open(self._raw_path, flags, 0o600)
        os.posix_fallocate(fd, 0, self._num_blocks * self._block_bytes)
        try:
            writes = [lambda: self._raw(fd, None), lambda: self._drive(range(len(keys)), store)]
            reads = [lambda: self._raw(fd, order), lambda: self._drive(order, load)]
            raw_write_s, tier_write_s = _both(writes, tier_first)
            raw_read_s, tier_read_s = _both(reads, tier_first)
        finally:
            os.close(fd)
        return DiskTimes(raw_write_s, tier_write_s, raw_read_s, tier_read_s)

    def _raw(self, fd: int, order: Sequence[int] | None) -> None:
        """Write all blocks, or read them in ``order``, from as many threads as the depth."""
        numbers = range(self._num_blocks) if order is None else order

        def work(worker: int) -> None:
            buffer = memoryview(self._memory[worker])
            for number in numbers[worker :: self._depth]:
                offset = number * self._block_bytes
                if order is None:
                    moved = os.pwritev(fd, [buffer], offset)
                else:
                    moved = os.preadv(fd, [buffer], offset)
                if moved != self._block_bytes:
                    raise UserError(f"the disk moved {moved} of {self._block_bytes} bytes")

        with ThreadPoolExecutor(self._depth) as pool:
            list(pool.map(work, range(self._depth)))

    def _drive(self, numbers: Sequence[int], submit: Callable[[int, Memory], int | None]) -> None:
        """Keep as many transfers under way as the depth allows, until all have ended."""
        left = list(reversed(numbers))
        free = list(range(self._depth))
        under_way: dict[int, int] = {}
        while left or under_way:
            while left and free:
                ticket = submit(left[-1], self._memory[free[-1]])
                if ticket is None:
                    break
                left.pop()
                under_way[ticket] = free.pop()
            if not select.select([self._tier.fd], [], [], 60.0)[0]:
                raise UserError("the SSD tier does not answer")
            for completion in self._tier.poll():
                if completion.outcome is not TierOutcome.DONE:
                    raise UserError(f"a transfer of the SSD tier ended as {completion.outcome}")
                free.append(under_way.pop(completion.ticket))


def _both(calls: Sequence[Callable[[], None]], reverse: bool) -> list[float]:
    """Return the seconds of each call, made in one order or the other."""
    seconds = [0.0] * len(calls)
    for i in reversed(range(len(calls))) if reverse else range(len(calls)):
        started_s = time.perf_counter()
        calls[i]()
        seconds[i] = time.perf_counter() - started_s
    return seconds


def check_direct(folder: Path) -> None:
    """Check that files in ``folder`` can be read and written past the page cache.

    Raises:
        UserError: The file system refuses direct I/O.
    """
    path = folder / "probe"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwritev(fd, [mmap.mmap(-1, 4096)], 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise UserError(
            f"{folder} takes no direct I/O ({error.strerror}): name a folder on a disk in --folder"
        ) from error
    finally:
        path.unlink(missing_ok=True)
