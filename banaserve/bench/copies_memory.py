"""Ways to copy scattered blocks of one size, each beside a memcpy of as many bytes."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import xxhash

import banaserve._native as _native
from banaserve.bench.kvstore_memory import plain_memory
from banaserve.errors import UserError

MEMCPY = "memcpy"
_memmove = ctypes.CDLL(None).memmove  # lets go of the GIL
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
Way = Callable[[int, int], None]
"""Copies the blocks from one number to another."""


class Seconds(NamedTuple):
    """By the clock, and on a processor by the thread that took longest.

    The second leaves out waiting for others that run on the same machine.
    """

    wall_s: float
    cpu_s: float


class CopyBench:
    """Blocks in two memories that no cache of the processor holds.

    Args:
        block_bytes: Of a block.
        sample_bytes: Copied by each sample.
        ring_bytes: Of each memory; samples take turns over it.
        seed: Of the bytes, and of the order of blocks.

    Attributes:
        ways: By name; memcpy copies the same bytes in one piece.
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
        """What each way takes for one sample, made in random order.

        Raises:
            UserError: One of them copied something else.
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
        """Go on to memory that was not touched lately, with blocks in another order."""
        self._turn = (self._turn + 1) % self._num_turns
        first = self._turn * self.num_blocks * self.block_bytes
        bounds = slice(first, first + self.num_blocks * self.block_bytes)
        shape = (self.num_blocks, self.block_bytes)
        self._source_blocks = self._source[bounds].reshape(shape)
        self._target_blocks = self._target[bounds].reshape(shape)
        # The same memory; torch copies bytes one by one where it is not told of larger elements.
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
        """Two passes, as it is done without a copy that makes the checksum."""
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
