"""Ways of transferring one prompt's blocks from one host to another."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from banaserve.base.access.key_files import PEER_KEY_VARIABLE
from banaserve.base.errors import UserError
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Lookup, Slot
from benchmarks.kvstore.memory import store_daemon
from benchmarks.network.hosts import Host

STORE_PORT, STREAM_PORT = 7100, 7200
POOL_SIZE = "1GiB"
_KEY = "a key of this benchmark's stores"
_NUM_LAYERS = 32
_BLOCK_TOKENS = 16
_DEADLINE_S = 120.0
_POLL_S = 2e-4
_CHUNK_BYTES = 1 << 20


class StoreWay:
    """Blocks between our store daemons: computed on the first host, read on the second.

    Args:
        stack: Exit stack that ends the daemons.
        block_bytes: Size of a block of all layers.
        num_blocks: Number of blocks of the prompt.
    """

    def __init__(
        self, hosts: Sequence[Host], stack: ExitStack, block_bytes: int, num_blocks: int
    ) -> None:
        source, target = hosts
        self._num_blocks = num_blocks
        self._fingerprint = Fingerprint(
            model="network",
            dtype="bfloat16",
            block_size_tokens=_BLOCK_TOKENS,
            num_layers=_NUM_LAYERS,
            num_kv_heads=8,
            head_size=128,
            layout="LBHNC",
            page_bytes=block_bytes // _NUM_LAYERS,
            probe="00ff",
        )
        self._block = np.random.default_rng(0).integers(0, 256, block_bytes, np.uint8)
        addresses = [f"{host.address}:{STORE_PORT}" for host in hosts]
        self._target_address = addresses[1]
        self._source = self._client(source, stack, addresses[0], addresses[1])
        self._target = self._client(target, stack, addresses[1], addresses[0])

    def _client(self, host: Host, stack: ExitStack, listen: str, peer: str) -> StoreClient:
        daemon = stack.enter_context(
            store_daemon(
                POOL_SIZE,
                *(f"--listen={listen}", f"--peer={peer}"),
                command_of=host.command,
                environment={PEER_KEY_VARIABLE: _KEY},
            )
        )
        client = StoreClient(
            daemon.socket_path, self._fingerprint, client_name="bench", timeout_s=10.0
        )
        stack.callback(client.close)
        client.connect()
        return client

    def fetch_s(self, run: int) -> float:
        """Return the seconds that the blocks of run ``run`` took to the other host.

        Raises:
            UserError: Some blocks are missing, or have wrong bytes.
        """
        keys = self._keys(f"{run}")
        self._write(keys)
        return self._collected_s(keys)

    def exposed_s(self, run: str, prefill_s: float, *, is_pushed: bool) -> float:
        """Return seconds from the end of a prefill until the other host has all of its blocks.

        Args:
            run: Name of the prompt.
            prefill_s: Duration of the prefill; all layers take equally long, and each leaves its KV
                in the store.
            is_pushed: True if the store is told the destination of the blocks before they are
                computed.
        """
        keys = self._keys(run)
        slots = self._reserve(keys)
        if is_pushed:
            self._source.push(self._target_address, keys)
        began_s = time.perf_counter()
        for layer in range(_NUM_LAYERS):
            self._fill(slots, layer)
            until_s = began_s + prefill_s * (layer + 1) / _NUM_LAYERS
            time.sleep(max(0.0, until_s - time.perf_counter()))
            self._source.note_written(slots, layer + 1)
        ended_s = time.perf_counter()
        self._source.commit(slots)
        self._collected_s(keys)
        return self._came_s - ended_s

    def _keys(self, run: str) -> list[bytes]:
        return [f"{run}-{number}".encode().ljust(32, b".") for number in range(self._num_blocks)]

    def _collected_s(self, keys: list[bytes]) -> float:
        began_s = time.perf_counter()
        until_s = began_s + _DEADLINE_S
        found = self._target.exchange(acquire=keys)
        while found.undecided or len(found.slots) < len(keys):
            if time.perf_counter() > until_s:
                raise UserError("the store on the other host does not find the blocks")
            if found.lease is not None:
                self._target.release(found.lease)
            time.sleep(_POLL_S)
            found = self._target.exchange(acquire=keys)
        while set(self._target.arrivals(found.slots)) != {Lookup.HIT}:
            if time.perf_counter() > until_s:
                raise UserError("blocks do not arrive on the other host")
            time.sleep(_POLL_S)
        self._came_s = time.perf_counter()
        self._check(found.slots)
        assert found.lease is not None
        self._target.release(found.lease)
        return self._came_s - began_s

    def _reserve(self, keys: list[bytes]) -> list[Slot]:
        pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
        slots = [one for one in self._source.exchange(reserve=pairs).reserved if one is not None]
        if len(slots) < len(keys):
            raise UserError("the pool has no room for the blocks of a prompt")
        return slots

    def _fill(self, slots: Sequence[Slot], layer: int) -> None:
        view, page_bytes = self._source.view(), self._fingerprint.page_bytes
        page = self._block[layer * page_bytes : (layer + 1) * page_bytes]
        for number, slot in enumerate(slots):
            first = view.offset_bytes(slot, layer)
            view.memory[first : first + page_bytes] = page
            if layer == 0:
                view.memory[first] = number % 256

    def _write(self, keys: list[bytes]) -> None:
        slots = self._reserve(keys)
        view = self._source.view()
        for number, slot in enumerate(slots):
            first = view.offset_bytes(slot)
            view.memory[first : first + len(self._block)] = self._block
            view.memory[first] = number % 256
        self._source.commit(slots)

    def _check(self, slots: Sequence[Any]) -> None:
        view = self._target.view()
        for number, slot in enumerate(slots):
            first = view.offset_bytes(slot)
            there = view.memory[first : first + len(self._block)]
            if there[0] != number % 256 or not np.array_equal(there[1:], self._block[1:]):
                raise UserError("a block has come with other bytes")


class StreamWay:
    """The same number of bytes in one plain TCP connection: the speed of one kernel stream."""

    def __init__(self, hosts: Sequence[Host], num_bytes: int) -> None:
        self._source, self._target = hosts
        self._num_bytes = num_bytes

    def fetch_s(self, run: int) -> float:
        """Return the seconds that as many bytes took to the other host, the same in each run."""
        del run
        address = (self._source.address, STREAM_PORT)
        listening = self._source.inside(lambda: socket.create_server(address))
        sending = threading.Thread(target=self._send, args=(listening,))
        sending.start()
        try:
            with self._target.inside(lambda: socket.create_connection(address)) as sock:
                began_s = time.perf_counter()
                sock.sendall(b".")
                left, into = self._num_bytes, bytearray(_CHUNK_BYTES)
                while left:
                    got = sock.recv_into(into, min(left, _CHUNK_BYTES))
                    if not got:
                        raise UserError("the other host has closed the connection")
                    left -= got
                return time.perf_counter() - began_s
        finally:
            sending.join()
            listening.close()

    def _send(self, listening: socket.socket) -> None:
        sock, _ = listening.accept()
        with sock:
            sock.recv(1)
            chunk = memoryview(bytes(_CHUNK_BYTES))
            left = self._num_bytes
            while left:
                sock.sendall(chunk[:left])
                left -= min(left, _CHUNK_BYTES)
