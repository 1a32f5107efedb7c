"""A store daemon and clients of it, in processes that a test may kill."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Slot
from banaserve.kvstore.stats import StoreStats
from fingerprints import FINGERPRINT
from forked import Forked
from store_process import fork_store

NUM_SLOTS = 16
KEYS = [bytes([number]) * 32 for number in range(64)]
DEADLINE_S = 60.0


class Store:
    """A daemon process and the clients that a test connected to it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.path = folder / "store.sock"
        self._stack = stack
        self.start()

    def start(self) -> None:
        size = NUM_SLOTS * FINGERPRINT.slot_bytes
        self.process = fork_store(self.path, size, "--poison-free-slots")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(
        self,
        name: str = "here",
        fingerprint: Fingerprint = FINGERPRINT,
        timeout_s: float = DEADLINE_S,
    ) -> StoreClient:
        client = StoreClient(self.path, fingerprint, client_name=name, timeout_s=timeout_s)
        self._stack.callback(client.close)
        return client

    def child(self, program: str) -> Forked:
        """A process that has run ``program`` up to its line ``wait()``, with client ``c``."""
        child = Forked(_run_child, self.path, textwrap.dedent(program), pipes=True)
        self._stack.enter_context(child)
        self._stack.callback(child.kill)
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        return child

    def stats(self) -> StoreStats:
        return fetch_stats(self.path, DEADLINE_S)


def _run_child(path: Path, program: str) -> None:
    def wait() -> None:
        print("waiting", flush=True)
        sys.stdin.readline()

    client = StoreClient(path, FINGERPRINT, client_name="child", timeout_s=DEADLINE_S)
    exec(program, {"os": os, "time": time, "KEYS": KEYS, "c": client, "wait": wait})


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """A store that must end well, and leave no socket behind."""
    with ExitStack() as stack:
        store = Store(folder, stack)
        yield store
        stack.close()
        store.process.send_signal(signal.SIGCONT)
        store.process.terminate()
        assert store.process.wait(DEADLINE_S) == 0
        assert not store.path.exists()


def reserve(client: StoreClient, keys: list[bytes]) -> list[Slot]:
    parents = [None, *keys[:-1]]
    reserved = client.exchange(reserve=list(zip(keys, parents, strict=True))).reserved
    slots = [slot for slot in reserved if slot is not None]
    assert len(slots) == len(keys)
    return slots


def write(client: StoreClient, keys: list[bytes]) -> None:
    """Store blocks whose bytes are the first byte of their key."""
    slots = reserve(client, keys)
    view = client.view()
    for key, slot in zip(keys, slots, strict=True):
        first = view.offset_bytes(slot)
        view.memory[first : first + view.slot_bytes] = key[0]
    assert client.commit(slots)


def read(client: StoreClient, keys: list[bytes]) -> list[bytes]:
    """The blocks of the readable prefix of ``keys``."""
    exchanged = client.exchange(acquire=keys)
    view = client.view()
    blocks = []
    for slot in exchanged.slots:
        first = view.offset_bytes(slot)
        blocks.append(view.memory[first : first + view.slot_bytes].tobytes())
    if exchanged.lease is not None:
        client.release(exchanged.lease)
    return blocks
