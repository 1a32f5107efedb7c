"""Two store daemons, each a process of its own, that share blocks through Mooncake."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.leases import Lookup
from mooncake_master import missing_mooncake, mooncake_master
from waiting import eventually

MISSING = missing_mooncake()
pytestmark = [pytest.mark.deep, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
DEADLINE_S = 60.0
KEYS = [bytes([number + 1]) * 32 for number in range(6)]
FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=30,
    num_kv_heads=3,
    head_size=64,
    layout="LBHNC",
    page_bytes=24576,
    probe="00ff",
)


class Daemon:
    """A store daemon with Mooncake below its memory."""

    def __init__(self, socket_path: Path, url: str, stack: ExitStack) -> None:
        self.socket_path = socket_path
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--socket", str(socket_path)]
        command += ["--size", "32MiB", "--distributed", url, "--ready-fd", str(writable)]
        process = subprocess.Popen([*command, "--die-with-parent"], pass_fds=(writable,))
        stack.callback(process.wait, DEADLINE_S)
        stack.callback(process.terminate)
        os.close(writable)
        with os.fdopen(readable, "rb") as ready:
            assert ready.read(1)
        eventually(lambda: self.tier().available)

    def tier(self):
        return fetch_stats(self.socket_path, DEADLINE_S).tiers[0].stats

    def client(self, stack: ExitStack, salt: str = "") -> StoreClient:
        fields = {name: getattr(FINGERPRINT, name) for name in FINGERPRINT.__struct_fields__}
        fingerprint = Fingerprint(**{**fields, "salt": salt})
        client = StoreClient(self.socket_path, fingerprint, client_name="c", timeout_s=DEADLINE_S)
        stack.callback(client.close)
        client.connect()
        return client


@pytest.fixture
def daemons(stack: ExitStack, tmp_path: Path) -> list[Daemon]:
    port = stack.enter_context(mooncake_master()).port
    url = f"mooncake://127.0.0.1:{port}?segment=64MiB"
    return [Daemon(tmp_path / f"{name}.sock", url, stack) for name in "ab"]


def write(client: StoreClient, seed: int) -> np.ndarray:
    """Store a chain of random blocks; returns their bytes ``[num_blocks, slot_bytes]``."""
    parents = [None, *KEYS[:-1]]
    slots = client.exchange(reserve=list(zip(KEYS, parents, strict=True))).reserved
    view = client.view()
    data = np.random.default_rng(seed).bytes(len(KEYS) * view.slot_bytes)
    blocks = np.frombuffer(data, np.uint8).reshape(len(KEYS), -1)
    for slot, block in zip(slots, blocks, strict=True):
        first = view.offset_bytes(slot)
        view.memory[first : first + view.slot_bytes] = block
    assert client.commit(slots)
    return blocks


def test_a_chain_stored_at_one_daemon_is_read_at_the_other(daemons, stack):
    here, there = daemons
    blocks = write(here.client(stack), seed=1)
    eventually(lambda: here.tier().stores == len(KEYS))
    reader = there.client(stack)
    eventually(lambda: reader.lookup(KEYS) == [Lookup.HIT] * len(KEYS))
    got = reader.exchange(acquire=KEYS)
    assert got.lease is not None
    assert len(got.slots) == len(KEYS)
    eventually(lambda: reader.arrivals(got.slots) == [Lookup.HIT] * len(KEYS))
    view = reader.view()
    for slot, block in zip(got.slots, blocks, strict=True):
        first = view.offset_bytes(slot)
        assert np.array_equal(view.memory[first : first + view.slot_bytes], block)
    reader.release(got.lease)
    assert there.tier().loads == len(KEYS)
    assert there.tier().corrupt == 0


def test_another_salt_finds_nothing(daemons, stack):
    here, there = daemons
    write(here.client(stack, salt="tenant-1"), seed=2)
    eventually(lambda: here.tier().stores == len(KEYS))
    other = there.client(stack, salt="tenant-2")
    eventually(lambda: other.lookup(KEYS) == [Lookup.MISS] * len(KEYS))
    assert other.exchange(acquire=KEYS).lease is None
    same = there.client(stack, salt="tenant-1")
    eventually(lambda: same.lookup(KEYS) == [Lookup.HIT] * len(KEYS))
