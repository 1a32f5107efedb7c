"""Speed of copies of scattered blocks, compared with memcpy.

``python -m benchmarks copies``. Each way of copying moves as many bytes as one memcpy in one piece,
in a random order of ways within each run, from and to memory that no cache holds. A fraction is
memcpy's time over the way's: the CPU time of the slowest thread, since wall time includes other
work of the machine.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from rich.progress import Progress

import banaserve._native as _native
from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.results import result
from banaserve_bench.results.statistics import median
from benchmarks.kvstore.memory import plain_memory

KIB, MIB = 2**10, 2**20
_BLOCK_BYTES = (32 * KIB, 128 * KIB, 512 * KIB, MIB, 4 * MIB)
_LARGE_BYTES = MIB
_THREADS = (1, 2)
_SAMPLE_BYTES = 32 * MIB
_RING_BYTES = 128 * MIB
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
    names = [*_HEADLINES, *(name for name in samples if name not in _HEADLINES)]
    notes = [
        f"streaming copies use {_native.copy_instructions()[:1] or ['memcpy']}; checksums are "
        "XXH3-64 of the xxhash package",
        f"copy_fraction and copy_checksum_fraction are the worst of {_LARGE_BYTES // KIB} KiB and "
        "more, 1 and 2 threads, streaming, in time on a processor; those by the clock say wall",
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
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if min(given.runs, given.repeats) < 1:
        raise UserError("--runs and --repeats are at least 1")
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
