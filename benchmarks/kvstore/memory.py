"""Put and get through the pool compared with memcpy, lookups, and round trips of a request."""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import banaserve._native as _native
from banaserve.base.errors import UserError
from banaserve.base.platform import linux
from banaserve.kvstore.client.channel import StoreChannel
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Slot
from banaserve.kvstore.pool import PoolView

MIB = 2**20
NUM_LAYERS = 32
BLOCK_BYTES = (3 * MIB // 2, 3 * MIB)
ARRANGEMENTS = ("layers", "whole")
LOOKUP_KEYS = 64
RING_BYTES = 128 * MIB

Memory = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


class PoolTimes(NamedTuple):
    """Seconds for one request's blocks, each copied once.

    CPU seconds are those of client and daemon together; they leave out waiting for other processes
    on the same machine.
    """

    memcpy_s: float
    put_s: float
    get_s: float
    memcpy_cpu_s: float
    put_cpu_s: float
    get_cpu_s: float


class Daemon(NamedTuple):
    socket_path: Path
    pid: int


def plain_memory(num_bytes: int, seed: int | None = None) -> Memory:
    """Return memory such as an engine has: present, of small pages; random if a seed is given."""
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory[:] = 1
    if seed is not None:
        memory[:] = np.frombuffer(np.random.default_rng(seed).bytes(num_bytes), np.uint8)
    return memory


@contextlib.contextmanager
def store_daemon(
    size: str,
    *options: str,
    command_of: Callable[[list[str]], list[str]] = list,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Daemon]:
    """Run a store daemon as a process.

    Args:
        command_of: Function that returns the command which runs another one, in the same process.
        environment: Variables in addition to those of this process.
    """
    readable, writable = os.pipe()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "store.sock"
        command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--die-with-parent"]
        command += ["--socket", str(path), "--size", size, "--ready-fd", str(writable), *options]
        log = (Path(folder) / "log").open("w+b")
        process = subprocess.Popen(
            command_of(command),
            pass_fds=(writable,),
            stdout=log,
            stderr=log,
            env={**os.environ, **(environment or {})},
        )
        os.close(writable)
        try:
            with os.fdopen(readable, "rb") as ready:
                if not ready.read(1):
                    log.seek(0)
                    raise UserError(log.read().decode().strip().splitlines()[-1])
            yield Daemon(path, process.pid)
        finally:
            process.terminate()
            process.wait()
            log.close()


class PoolBench:
    """Benchmark of one client and the blocks of one request, of one size.

    Args:
        daemon: Daemon that stores the blocks.
        block_bytes: Size of one block of all layers.
        num_blocks: Number of blocks of a request.
        seed: Seed of the blocks' bytes.
        ring_bytes: Size of the memory that requests use in turn, so that no cache of the processor
            holds what a copy is about to touch.
    """

    def __init__(
        self,
        daemon: Daemon,
        block_bytes: int,
        num_blocks: int,
        seed: int,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self.num_blocks = num_blocks
        self._pid = daemon.pid
        self._page_bytes = block_bytes // NUM_LAYERS
        self._block_bytes = block_bytes
        fingerprint = Fingerprint(
            model=f"bench-{block_bytes}-{num_blocks}",
            dtype="bfloat16",
            block_size_tokens=16,
            num_layers=NUM_LAYERS,
            num_kv_heads=8,
            head_size=128,
            layout="bench",
            page_bytes=self._page_bytes,
        )
        self.client = StoreClient(
            daemon.socket_path, fingerprint, client_name="bench", timeout_s=30.0, populate=False
        )
        self.client.connect()
        self._view: PoolView = self.client.view()
        linux.populate(self._view.memory.ctypes.data, self._view.memory.size)
        self._request_bytes = num_blocks * block_bytes
        self._num_turns = max(2, -(-ring_bytes // self._request_bytes))
        # Each request is kept layer by layer, as an engine has a cache for each layer.
        self._source = plain_memory(self._num_turns * self._request_bytes, seed)
        self._target = plain_memory(self._num_turns * self._request_bytes)
        self._turn = 0
        self._last_key = 0

    def close(self) -> None:
        self.client.close()

    def run(self, arrangement: str) -> PoolTimes:
        """Copy, put and get one request's blocks; return the times.

        Args:
            arrangement: ``layers`` copies layer by layer, as an engine does; ``whole`` copies each
                block in one piece.

        Raises:
            UserError: The store returned wrong bytes.
        """
        self._turn = (self._turn + 1) % self._num_turns
        memcpy_s, memcpy_cpu_s = self._timed(self._memcpy)
        self._turn = (self._turn + 1) % self._num_turns
        keys = self.new_keys()
        source, target = self._bytes_of(self._source), self._bytes_of(self._target)
        # Bytes that an earlier turn left in the target must not pass for those of the store.
        source[:: self._page_bytes] = self._last_key // self.num_blocks % 251
        put_s, put_cpu_s = self._timed(lambda: self.put(keys, arrangement))
        get_s, get_cpu_s = self._timed(lambda: self.get(keys, arrangement))
        if not np.array_equal(source, target):
            raise UserError("the store returned other bytes than were put into it")
        return PoolTimes(memcpy_s, put_s, get_s, memcpy_cpu_s, put_cpu_s, get_cpu_s)

    def new_keys(self) -> list[bytes]:
        """Return the keys of a chain that are new to the store."""
        first = self._last_key
        self._last_key += self.num_blocks
        return [number.to_bytes(32, "big") for number in range(first, self._last_key)]

    def put(self, keys: list[bytes], arrangement: str) -> None:
        """Put one request's blocks: reserve, copy, commit."""
        parents = [None, *keys[:-1]]
        slots = self.client.exchange(reserve=list(zip(keys, parents, strict=True))).reserved
        reserved = [slot for slot in slots if slot is not None]
        assert len(reserved) == len(keys)
        self._copy(reserved, arrangement, is_put=True)
        assert self.client.commit(reserved)

    def get(self, keys: list[bytes], arrangement: str) -> None:
        """Get one request's blocks: lease, copy, release."""
        got = self.client.exchange(acquire=keys)
        assert got.lease is not None
        assert len(got.slots) == len(keys)
        self._copy(list(got.slots), arrangement, is_put=False)
        self.client.release(got.lease)

    def lookups_per_s(self, num_calls: int) -> float:
        """Return lookups a second, of 64 keys each, half of which the store has."""
        keys = self.new_keys()
        self.put(keys, "whole")
        missing = [b"\xff" * 24 + number.to_bytes(8, "big") for number in range(LOOKUP_KEYS)]
        half = (keys * LOOKUP_KEYS)[: LOOKUP_KEYS // 2]
        asked = [key for pair in zip(half, missing, strict=False) for key in pair]
        seconds, _ = self._timed(lambda: [self.client.lookup(asked) for _ in range(num_calls)])
        return num_calls / seconds

    def round_trips(self) -> int:
        """Return how often a request whose first half is in the store waits for the daemon.

        Only messages whose reply the client waits for are counted.
        """
        keys = self.new_keys()
        half = keys[: len(keys) // 2]
        self.put(half, "layers")
        with _counted_calls() as calls:
            rest = keys[len(half) :]
            parents = [half[-1], *rest[:-1]]
            got = self.client.exchange(acquire=half, reserve=list(zip(rest, parents, strict=True)))
            self._copy(list(got.slots), "layers", is_put=False)
            reserved = [slot for slot in got.reserved if slot is not None]
            self._copy(reserved, "layers", is_put=True)
            assert got.lease is not None
            self.client.release(got.lease)
            assert self.client.commit(reserved)
        return len(calls)

    def _bytes_of(self, memory: Memory) -> Memory:
        """Return the part of ``memory`` that this turn uses."""
        first = self._turn * self._request_bytes
        return memory[first : first + self._request_bytes]

    def _memcpy(self) -> None:
        offsets = np.arange(self.num_blocks, dtype=np.int64) * self._block_bytes
        source, target = self._bytes_of(self._source), self._bytes_of(self._target)
        size = source.size
        _native.copy_regions(
            target.ctypes.data, source.ctypes.data, offsets, offsets, self._block_bytes, size, size
        )

    def _copy(self, slots: list[Slot], arrangement: str, *, is_put: bool) -> None:
        slot_numbers = np.asarray([slot.index for slot in slots], dtype=np.int64)
        numbers = np.arange(len(slots), dtype=np.int64)
        memory = self._bytes_of(self._source if is_put else self._target)
        here, size = memory.ctypes.data, memory.size
        if arrangement == "whole":
            own = numbers * self._block_bytes
            self._move((here, size, own), slot_numbers, 0, self._block_bytes, is_put)
            return
        # As in the connector's copier, the same block numbers hold for every layer.
        own = numbers * self._page_bytes
        for layer in range(NUM_LAYERS):
            first = layer * self.num_blocks * self._page_bytes
            inside = self._view.fingerprint.offset_bytes(layer)
            mine = (here + first, size - first, own)
            self._move(mine, slot_numbers, inside, self._page_bytes, is_put)

    def _move(
        self,
        mine: tuple[int, int, Offsets],
        slots: Offsets,
        in_slot: int,
        num_bytes: int,
        is_put: bool,
    ) -> None:
        """Copy between ``mine`` (address, bytes, offsets) and ``in_slot`` bytes into the slots."""
        here, own_size, own = mine
        there, pool_size = self._view.base_address + in_slot, self._view.memory.size - in_slot
        pool = slots * self._view.slot_bytes
        if is_put:
            _native.copy_regions(
                there, here, pool, own, num_bytes, pool_size, own_size, streaming=True
            )
        else:
            _native.copy_regions(here, there, own, pool, num_bytes, own_size, pool_size)

    def _timed(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Return seconds of wall time, and of CPU time of this thread and the daemon."""
        daemon_s, own_s = _running_s(self._pid), time.thread_time()
        started_s = time.perf_counter()
        work()
        seconds = time.perf_counter() - started_s
        return seconds, time.thread_time() - own_s + _running_s(self._pid) - daemon_s


def _running_s(pid: int) -> float:
    """Return the CPU seconds of the first thread of a process."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextlib.contextmanager
def _counted_calls() -> Iterator[list[str]]:
    """Record the type of each request whose answer a client in this process waits for."""
    calls: list[str] = []
    plain = StoreChannel.call

    def counted(self: StoreChannel, build: Any, reply_type: Any) -> Any:
        calls.append(type(build(0)).__name__)
        return plain(self, build, reply_type)

    StoreChannel.call = counted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        StoreChannel.call = plain  # type: ignore[method-assign]
