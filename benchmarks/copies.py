"""Speed of copies of scattered blocks, compared with memcpy and with the disk.

``python -m benchmarks copies``. Each way of copying moves as many bytes as one memcpy in one piece,
in a random order of ways within each run, from and to memory that no cache holds. A fraction is
memcpy's time over the way's: the CPU time of the slowest thread, since wall time includes other
work of the machine. On disk, the native queue is compared with threads that make the system calls
themselves, past the page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from rich.progress import Progress

import banaserve._native as _native
from banaserve._native import DiskQueue
from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.base.statistics import median
from banaserve_bench.results import result
from benchmarks.kvstore.disk import check_direct
from benchmarks.kvstore.memory import plain_memory
from benchmarks.script import run_script

KIB, MIB = 2**10, 2**20
_BLOCK_BYTES = (32 * KIB, 128 * KIB, 512 * KIB, MIB, 4 * MIB)
_LARGE_BYTES = MIB
_THREADS = (1, 2)
_SAMPLE_BYTES = 32 * MIB
_RING_BYTES = 128 * MIB
_DISK_BLOCK_BYTES = 3 * MIB
MEMCPY = "memcpy"
# The worst fraction over large blocks and both numbers of threads.
_HEADLINES = (
    "copy_fraction",
    "copy_checksum_fraction",
    "copy_wall_fraction",
    "copy_checksum_wall_fraction",
)
_memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
Samples = dict[str, list[float]]
Way = Callable[[int, int], None]
"""Function that copies the blocks from one number up to another."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    given = _parse(argv)
    torch.set_num_threads(1)  # the pipeline's own threads are what is measured
    started_at = datetime.now(UTC)
    samples: Samples = defaultdict(list)
    with Progress(transient=True) as progress:
        _memory(given, samples, progress)
        engine = _disk(given, samples, progress)
    names = [*_HEADLINES, *(name for name in samples if name not in _HEADLINES)]
    notes = [
        f"streaming copies use {_native.copy_instructions()[:1] or ['memcpy']}; checksums are "
        "XXH3-64 of the xxhash package",
        f"copy_fraction and copy_checksum_fraction are the worst of {_LARGE_BYTES // KIB} KiB and "
        "more, 1 and 2 threads, streaming, in time on a processor; those by the clock say wall",
        f"disk: {engine} beside preadv and pwritev of threads, at the same depth",
    ]
    record = result.result(
        "copies",
        seed=given.seed,
        options={name: str(value) for name, value in vars(given).items() if name != "json"},
        started_at=started_at,
        figures={name: result.figure(samples[name], _unit(name)) for name in names},
        notes=notes,
    )
    result.deliver(record, given.json)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks copies", description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, help="write the result there")
    add("--runs", type=int, default=5)
    add("--repeats", type=int, default=9, help="of each copy within a run; the median counts")
    add("--disk-blocks", type=int, default=64, help="of 3 MiB, of a run on disk; 0 for none")
    add("--depth", type=int, default=8, help="transfers of the disk at once")
    add("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if min(given.runs, given.repeats, given.depth) < 1 or given.disk_blocks < 0:
        raise UserError("--runs, --repeats and --depth are at least 1, --disk-blocks at least 0")
    return given


def _unit(name: str) -> str:
    return "fraction" if "fraction" in name else "GB/s"


def _memory(given: argparse.Namespace, samples: Samples, progress: Progress) -> None:
    task = progress.add_task("memory", total=given.runs * len(_BLOCK_BYTES) * len(_THREADS))
    with ThreadPoolExecutor(max(_THREADS)) as pool:
        for run in range(given.runs):
            large: dict[str, list[float]] = defaultdict(list)
            for block_bytes in _BLOCK_BYTES:
                bench = CopyBench(block_bytes, _SAMPLE_BYTES, _RING_BYTES, given.seed + run)
                bench.run(pool, 1)  # meets page faults, and code that was never called
                for num_threads in _THREADS:
                    case = f"{block_bytes // KIB}kib_{num_threads}t"
                    fractions = _case(bench, pool, num_threads, given.repeats, samples, case)
                    if block_bytes >= _LARGE_BYTES:
                        for name, fraction in fractions.items():
                            large[name].append(fraction)
                    progress.advance(task)
            for name in _HEADLINES:
                samples[name].append(min(large[name]))


def _case(
    bench: CopyBench,
    pool: ThreadPoolExecutor,
    num_threads: int,
    repeats: int,
    samples: Samples,
    case: str,
) -> dict[str, float]:
    """Return each way's median fraction over repeats, for one run of one size, by figure name."""
    runs = [bench.run(pool, num_threads) for _ in range(repeats)]
    # The only speed that is kept is memcpy's, for comparison with other machines.
    samples[f"memcpy_gb_per_s_{case}"].append(
        median([_SAMPLE_BYTES / one[MEMCPY].wall_s / 1e9 for one in runs])
    )
    fractions, wall = {}, {}
    for way in bench.ways:
        if way != MEMCPY:
            cpu = [one[MEMCPY].cpu_s / one[way].cpu_s for one in runs]
            fractions[f"{way}_fraction"] = median(cpu)
            by_clock = [one[MEMCPY].wall_s / one[way].wall_s for one in runs]
            wall[f"{way}_wall_fraction"] = median(by_clock)
    for name, fraction in fractions.items():
        samples[f"{name}_{case}"].append(fraction)
    return {**fractions, **wall}


class Seconds(NamedTuple):
    """Wall time, and CPU time of the thread that took longest.

    CPU time leaves out waiting for other processes on the same machine.
    """

    wall_s: float
    cpu_s: float


class CopyBench:
    """Benchmark of blocks in two memories that no cache of the processor holds.

    Args:
        block_bytes: Size of a block.
        sample_bytes: Number of bytes that each sample copies.
        ring_bytes: Size of each memory; samples use its parts in turn.
        seed: Seed of the bytes and of the order of blocks.

    Attributes:
        ways: Functions by name; memcpy copies the same bytes in one piece.
    """

    def __init__(self, block_bytes: int, sample_bytes: int, ring_bytes: int, seed: int) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = sample_bytes // block_bytes
        self._num_turns = ring_bytes // sample_bytes
        self._source = plain_memory(ring_bytes, seed)
        self._target = plain_memory(ring_bytes)
        self._random = random.Random(seed)
        self._turn = 0
        self.ways: dict[str, Way] = {
            MEMCPY: self._memcpy,
            "copy": lambda first, end: self._copy(first, end, streaming=True),
            "copy_cached": lambda first, end: self._copy(first, end, streaming=False),
            "copy_checksum": lambda first, end: self._checksum(first, end, streaming=True),
            "copy_cached_checksum": lambda first, end: self._checksum(first, end, streaming=False),
            "copy_then_checksum": self._copy_then_checksum,
            "numpy": self._numpy,
            "torch": self._torch,
        }
        self._shuffle()

    def run(self, pool: ThreadPoolExecutor, num_threads: int) -> dict[str, Seconds]:
        """Run each way on one sample, in random order; return the times by name.

        Raises:
            UserError: A way copied wrong bytes.
        """
        names = list(self.ways)
        self._random.shuffle(names)
        seconds = {}
        for name in names:
            self._shuffle()
            self._target_blocks[self._to] = 0  # present, and no leftover of another way
            seconds[name] = self._timed(pool, num_threads, self.ways[name])
            to = np.arange(self.num_blocks) if name == MEMCPY else self._to
            of = np.arange(self.num_blocks) if name == MEMCPY else self._of
            if not (self._target_blocks[to, ::4093] == self._source_blocks[of, ::4093]).all():
                raise UserError(f"{name} copied other bytes than it was asked to")
        return seconds

    def _timed(self, pool: ThreadPoolExecutor, num_threads: int, way: Way) -> Seconds:
        bounds = [i * self.num_blocks // num_threads for i in range(num_threads + 1)]

        def work(first: int, end: int) -> float:
            began_s = time.thread_time()
            way(first, end)
            return time.thread_time() - began_s

        began_s = time.perf_counter()
        cpu_s = max(pool.map(work, bounds[:-1], bounds[1:]))
        return Seconds(time.perf_counter() - began_s, cpu_s)

    def _shuffle(self) -> None:
        """Switch to memory that was not used recently, with blocks in a new order."""
        self._turn = (self._turn + 1) % self._num_turns
        first = self._turn * self.num_blocks * self.block_bytes
        bounds = slice(first, first + self.num_blocks * self.block_bytes)
        shape = (self.num_blocks, self.block_bytes)
        self._source_blocks = self._source[bounds].reshape(shape)
        self._target_blocks = self._target[bounds].reshape(shape)
        # The same memory; torch copies bytes one by one unless it is given larger elements.
        self._source_tensor = torch.from_numpy(self._source_blocks).view(torch.int64)
        self._target_tensor = torch.from_numpy(self._target_blocks).view(torch.int64)
        numbers = range(self.num_blocks)
        self._of, self._to = (
            np.array(self._random.sample(numbers, len(numbers)), np.int64) for _ in range(2)
        )

    def _memcpy(self, first: int, end: int) -> None:
        start = first * self.block_bytes
        source, target = self._source_blocks.ctypes.data, self._target_blocks.ctypes.data
        _memmove(target + start, source + start, (end - first) * self.block_bytes)

    def _copy(self, first: int, end: int, *, streaming: bool) -> None:
        _native.copy_regions(*self._arguments(first, end), streaming=streaming)

    def _checksum(self, first: int, end: int, *, streaming: bool) -> None:
        _native.copy_regions_checksummed(*self._arguments(first, end), streaming=streaming)

    def _copy_then_checksum(self, first: int, end: int) -> None:
        """Copy and make checksums in two passes, as without a copy that does both."""
        self._copy(first, end, streaming=True)
        digest = xxhash.xxh3_64()
        for block in self._to[first:end]:
            digest.update(self._target_blocks[block].data)

    def _numpy(self, first: int, end: int) -> None:
        self._target_blocks[self._to[first:end]] = self._source_blocks[self._of[first:end]]

    def _torch(self, first: int, end: int) -> None:
        to, of = torch.from_numpy(self._to[first:end]), torch.from_numpy(self._of[first:end])
        self._target_tensor[to] = self._source_tensor[of]

    def _arguments(
        self, first: int, end: int
    ) -> tuple[int, int, np.ndarray, np.ndarray, int, int, int]:
        source, target = self._source_blocks, self._target_blocks
        return (
            target.ctypes.data,
            source.ctypes.data,
            self._to[first:end] * self.block_bytes,
            self._of[first:end] * self.block_bytes,
            self.block_bytes,
            target.nbytes,
            source.nbytes,
        )


def _disk(given: argparse.Namespace, samples: Samples, progress: Progress) -> str:
    if not given.disk_blocks:
        return "not measured"
    check_direct(given.folder)
    task = progress.add_task("disk", total=given.runs)
    bench = QueueBench(given.folder, _DISK_BLOCK_BYTES, given.disk_blocks, given.depth, given.seed)
    with closing(bench):
        bench.run()  # the file's blocks are written for the first time
        for _ in range(given.runs):
            seconds = bench.run()
            num_bytes = given.disk_blocks * _DISK_BLOCK_BYTES
            for kind in ("write", "read"):
                raw_s, queue_s = seconds[f"raw_{kind}"], seconds[f"queue_{kind}"]
                samples[f"disk_{kind}_fraction"].append(raw_s / queue_s)
                samples[f"disk_raw_{kind}_gb_per_s"].append(num_bytes / raw_s / 1e9)
            progress.advance(task)
    return bench.engine


class QueueBench:
    """Benchmark of blocks of one size in a file that is as long as all of them.

    Args:
        folder: Folder on the disk to measure.
        block_bytes: Size of a block, a multiple of the page size.
        num_blocks: Number of blocks of a run.
        depth: Number of transfers under way at once.
        seed: Seed of the bytes and of the order of blocks.
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
        """Name of the engine that moves the queue's bytes."""
        return self._queue.engine

    def close(self) -> None:
        """Close the queue and the file."""
        self._queue.close()
        os.close(self._fd)

    def run(self) -> dict[str, float]:
        """Return seconds by ``queue_write``, ``raw_write``, ``queue_read`` and ``raw_read``."""
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
            for buffer, num_bytes in self._queue.poll():
                self._check(num_bytes)
                free.append(buffer)
                under_way -= 1

    def _check(self, result: int) -> None:
        if result != self._block_bytes:
            raise UserError(f"the disk moved {result} of {self._block_bytes} bytes")


if __name__ == "__main__":
    run_script(main)
