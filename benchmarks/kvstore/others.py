"""Blocks through Mooncake Store and Redis, each in a process of its own, over TCP."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from banaserve.base.errors import UserError
from benchmarks.kvstore.memory import Memory, plain_memory
from benchmarks.kvstore.peers import joined_mooncake, mooncake_master, redis_server

_MIB = 2**20


class OtherTimes(NamedTuple):
    """Seconds for one request's blocks."""

    put_s: float
    get_s: float


class OtherStore(Protocol):
    """A store that keeps blocks elsewhere."""

    def put(self, keys: Sequence[str], blocks: Memory) -> None:
        """Store ``blocks``, ``[num_blocks, block_bytes]``."""
        ...

    def get(self, keys: Sequence[str], blocks: Memory) -> None:
        """Load into ``blocks``."""
        ...


class OtherBench:
    """Benchmark of one request's blocks through another store.

    Args:
        store: Store to measure.
        source: Blocks to put, ``[num_blocks, block_bytes]``; registered with the store if it
            requires that.
        target: Memory for the blocks that are read, as ``source``.
    """

    def __init__(self, store: OtherStore, source: Memory, target: Memory) -> None:
        self._store = store
        self._source = source
        self._target = target
        self._run = 0

    def run(self) -> OtherTimes:
        """Put and get the blocks under new names; return the times.

        Raises:
            UserError: The store returned wrong bytes.
        """
        self._run += 1
        self._source[:, ::4096] = self._run % 251
        keys = [f"bench-{self._run}-{number}" for number in range(len(self._source))]
        started_s = time.perf_counter()
        self._store.put(keys, self._source)
        stored_s = time.perf_counter()
        self._store.get(keys, self._target)
        ended_s = time.perf_counter()
        if not np.array_equal(self._source, self._target):
            raise UserError(f"{type(self._store).__name__} returned other bytes")
        return OtherTimes(stored_s - started_s, ended_s - stored_s)


@contextlib.contextmanager
def mooncake_bench(block_bytes: int, num_blocks: int, seed: int) -> Iterator[OtherBench]:
    """Run Mooncake Store with its zero-copy calls; another process lends the memory."""
    source, target = _buffers(block_bytes, num_blocks, seed)
    with mooncake_master() as master:
        lender = joined_mooncake(master, "segment=512MiB")
        store = None
        try:
            store = Mooncake(f"127.0.0.1:{master.port}", [source, target])
            yield OtherBench(store, source, target)
        finally:
            if store is not None:
                store.close()
            lender.close()


@contextlib.contextmanager
def redis_bench(block_bytes: int, num_blocks: int, seed: int) -> Iterator[OtherBench]:
    """Run Redis without persistence."""
    source, target = _buffers(block_bytes, num_blocks, seed)
    with redis_server() as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        yield OtherBench(Redis(sock, 512 * _MIB), source, target)


class Mooncake:
    """Mooncake's own client in this process.

    Args:
        master: Address of the master, ``HOST:PORT``.
        buffers: Memories that blocks are read from and into.
        host: Address at which others reach this client.
        segment_bytes: Size of the memory that this client lends.
    """

    def __init__(
        self,
        master: str,
        buffers: Sequence[Memory],
        host: str = "127.0.0.1",
        segment_bytes: int = 0,
    ) -> None:
        # Imported by name, since the package is an extra.
        package = importlib.import_module("mooncake.store")
        self._client: Any = package.MooncakeDistributedStore()
        code = self._client.setup(host, "P2PHANDSHAKE", segment_bytes, 16 * _MIB, "tcp", "", master)
        for buffer in buffers:
            code = code or self._client.register_buffer(buffer.ctypes.data, buffer.nbytes)
        if code:
            raise UserError(f"Mooncake's client cannot be set up (code {code})")

    def put(self, keys: Sequence[str], blocks: Memory) -> None:
        codes = self._client.batch_put_from(list(keys), _addresses(blocks), _sizes(blocks))
        if any(codes):
            raise UserError(f"Mooncake stored nothing (codes {sorted(set(codes))})")

    def get(self, keys: Sequence[str], blocks: Memory) -> None:
        codes = self._client.batch_get_into(list(keys), _addresses(blocks), _sizes(blocks))
        if codes != _sizes(blocks):
            raise UserError(f"Mooncake loaded something else (codes {sorted(set(codes))})")

    def close(self) -> None:
        """Disconnect from the store."""
        self._client.close()


class Redis:
    """Minimal client: sends requests in one go and reads replies into place.

    Args:
        sock: Connected socket.
        max_bytes: Memory limit of the server, which evicts what was used longest ago.
    """

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._file = io.BufferedReader(socket.SocketIO(sock, "r"), 65536)
        for setting in ((b"maxmemory", b"%d" % max_bytes), (b"maxmemory-policy", b"allkeys-lru")):
            self._sock.sendall(_command(b"CONFIG", b"SET", *setting))
            self._expect(b"+OK")

    def put(self, keys: Sequence[str], blocks: Memory) -> None:
        for key, block in zip(keys, blocks, strict=True):
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n" % (len(key), key.encode())
            self._sock.sendall(b"%s$%d\r\n" % (head, block.size))
            self._sock.sendall(memoryview(block))
            self._sock.sendall(b"\r\n")
        for _ in keys:
            self._expect(b"+OK")

    def get(self, keys: Sequence[str], blocks: Memory) -> None:
        self._sock.sendall(b"".join(_command(b"GET", key.encode()) for key in keys))
        for block in blocks:
            self._expect(b"$%d" % block.size)
            view = memoryview(block)
            while view:
                view = view[self._file.readinto(view) :]
            self._expect(b"")

    def _expect(self, line: bytes) -> None:
        got = self._file.readline()
        if got != line + b"\r\n":
            raise UserError(f"Redis answered {got[:80]!r}")


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)


def _buffers(block_bytes: int, num_blocks: int, seed: int) -> tuple[Memory, Memory]:
    shape = (num_blocks, block_bytes)
    source = plain_memory(num_blocks * block_bytes, seed).reshape(shape)
    return source, plain_memory(num_blocks * block_bytes).reshape(shape)


def _addresses(blocks: Memory) -> list[int]:
    return [ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in blocks]


def _sizes(blocks: Memory) -> list[int]:
    return [block.size for block in blocks]
