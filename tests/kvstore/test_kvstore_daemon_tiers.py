"""A real daemon over a real SSD tier: down, up, restarts, kills and faults."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from banaserve.cli.main import main
from banaserve.kvstore.client.admin import clear_store, fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.daemon.metrics import prometheus_text
from banaserve.kvstore.leases import Exchanged, Lookup, Slot
from banaserve.kvstore.stats import StoreStats, TierReport
from banaserve.kvstore.tiers.ssd.scan import check_folder
from depth import chosen_seed
from fingerprints import FINGERPRINT as SMALL
from store_process import fork_store
from waiting import eventually

FINGERPRINT = msgspec.structs.replace(SMALL, page_bytes=4096)
SLOT_BYTES = FINGERPRINT.slot_bytes
NUM_SLOTS = 16
DEADLINE_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def chain(first: int, number: int) -> list[bytes]:
    return [key(first + i) for i in range(number)]


def block(of: bytes) -> bytes:
    """The bytes of a key's block: different everywhere, the same each time."""
    seed = int.from_bytes(of[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, SLOT_BYTES, np.uint8).tobytes()


class Store:
    """A daemon with a folder for its SSD tier."""

    def __init__(self, folder: Path, stack: ExitStack, name: str = "store") -> None:
        self.path = folder / f"{name}.sock"
        self.log = folder / f"{name}.log"
        self.ssd = folder / "ssd"
        self._stack = stack

    def start(self, *more: str, num_slots: int = NUM_SLOTS, ssd: Path | None = None) -> None:
        options = ["--poison-free-slots", "--ssd", str(ssd or self.ssd), "--ssd-size", "16MiB"]
        with self.log.open("ab") as log:
            size = num_slots * SLOT_BYTES
            self.process = fork_store(self.path, size, *options, *more, stderr=log)
        self._stack.callback(self.kill)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(DEADLINE_S) == 0

    def client(self, name: str = "here") -> StoreClient:
        client = StoreClient(self.path, FINGERPRINT, client_name=name, timeout_s=DEADLINE_S)
        self._stack.callback(client.close)
        return client

    def stats(self) -> StoreStats:
        return fetch_stats(self.path, DEADLINE_S)

    def tier(self) -> TierReport:
        return self.stats().tiers[0]

    def written(self) -> None:
        """Wait until everything is on the disk."""
        eventually(lambda: self.tier().backlog_blocks == 0 and self.tier().stats.in_flight == 0)


@pytest.fixture
def store(tmp_path: Path, stack: ExitStack) -> Store:
    return Store(tmp_path, stack)


def put(client: StoreClient, keys: Sequence[bytes], slots: Sequence[Slot | None]) -> None:
    """Write the blocks of those keys that got a slot."""
    view = client.view()
    granted = []
    for of, slot in zip(keys, slots, strict=True):
        if slot is not None:
            first = view.offset_bytes(slot)
            view.memory[first : first + SLOT_BYTES] = np.frombuffer(block(of), np.uint8)
            granted.append(slot)
    assert client.commit(granted)


def write(client: StoreClient, keys: Sequence[bytes], tenant: bytes = b"") -> int:
    """Store a chain; how many of its blocks got a slot."""
    pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
    reserved = client.exchange(reserve=pairs, tenant=tenant).reserved
    put(client, keys, reserved)
    return sum(slot is not None for slot in reserved)


def read(client: StoreClient, keys: Sequence[bytes], tenant: bytes = b"") -> int:
    """Read what there is of a chain, from wherever it is, and compare each byte.

    Returns:
        How many blocks were right; a block whose promotion failed ends the chain.
    """
    exchanged = client.exchange(acquire=keys, tenant=tenant)
    try:
        return _compare(client, keys, exchanged)
    finally:
        if exchanged.lease is not None:
            client.release(exchanged.lease)


def _compare(client: StoreClient, keys: Sequence[bytes], exchanged: Exchanged) -> int:
    slots = exchanged.slots
    eventually(lambda: Lookup.PENDING not in client.arrivals(slots))
    for number, (of, slot) in enumerate(zip(keys, slots, strict=False)):
        if client.arrivals([slot]) == [Lookup.MISS]:
            return number
        view = client.view(slot.generation)
        first = view.offset_bytes(slot)
        assert view.memory[first : first + SLOT_BYTES].tobytes() == block(of), "a wrong block"
    return len(slots)


def test_blocks_go_down_and_come_back(store: Store) -> None:
    store.start()
    client = store.client()
    chains = [chain(100 * i, 6) for i in range(8)]
    for keys in chains:
        assert write(client, keys) == 6
        store.written()
    assert store.stats().evictions >= 32
    assert store.tier().demoted == 48
    for keys in chains:
        assert client.lookup(keys) == [Lookup.HIT] * 6
        assert read(client, keys) == 6
    stats = store.stats()
    assert stats.tiers[0].promoted >= 32
    assert stats.tiers[0].measured_fetch_s > 0
    assert (stats.num_leases, stats.promoting_slots) == (0, 0)


def test_a_restart_finds_the_blocks_on_the_disk(store: Store) -> None:
    store.start()
    client = store.client()
    keys = chain(0, 10)
    write(client, keys)
    # SIGTERM at once: what is not on the disk yet is written first.
    store.stop()
    assert check_folder(store.ssd).is_clean
    store.start()
    eventually(lambda: client.lookup(keys) == [Lookup.HIT] * 10)
    assert store.stats().used_slots == 0
    generation = client.view().generation
    exchanged = client.exchange(acquire=keys)
    assert exchanged.num_ready == 0
    assert {slot.generation for slot in exchanged.slots} == {generation}
    assert exchanged.lease is not None
    client.release(exchanged.lease)
    # A chain longer than what may be promoted at once comes in parts.
    eventually(lambda: read(client, keys) == 10)
    assert client.exchange(acquire=keys).num_ready == 10


@pytest.mark.deep
def test_kills_during_writes_never_yield_a_wrong_block(store: Store) -> None:
    pick = random.Random(chosen_seed(7))
    num_read = 0
    first = 0
    client = store.client()
    for _ in range(12):
        store.start()
        eventually(lambda: client.stats() is not None)
        # Old chains are read while new ones are written, until the daemon dies in the middle.
        kill = f"read _; sleep {pick.uniform(0.0, 0.25):.3f}; kill -9 {store.process.pid}"
        killer = subprocess.Popen(["/bin/sh", "-c", kill], stdin=subprocess.PIPE)
        assert killer.stdin is not None
        while client.stats() is not None:
            first += 100
            pairs = [(of, None) for of in chain(first, 4)]
            reserved = client.exchange(reserve=pairs).reserved
            slots = [slot for slot in reserved if slot is not None]
            if not slots or slots[0].generation != client.view().generation:
                continue
            view = client.view()
            for (of, _), slot in zip(pairs, reserved, strict=True):
                if slot is not None:
                    begin = view.offset_bytes(slot)
                    view.memory[begin : begin + SLOT_BYTES] = np.frombuffer(block(of), np.uint8)
            client.commit(slots)
            num_read += read(client, chain(100 * pick.randrange(1, first // 100 + 1), 4))
            if not killer.stdin.closed:
                eventually(lambda: store.tier().demoted)
                killer.stdin.close()
        killer.wait()
        store.process.wait()
        report = check_folder(store.ssd)
        assert report.num_corrupt == 0, report.problems
    store.start()
    eventually(lambda: client.stats() is not None)
    found = sum(read(client, chain(100 * i, 4)) for i in range(1, first // 100 + 1))
    assert num_read > 0
    assert found > 0


def test_tenants_keep_to_their_quota_and_to_themselves(store: Store) -> None:
    store.start("--tenant-quota", "0.5")
    client = store.client()
    assert write(client, chain(0, 6), b"alice") == 6
    for first in range(100, 1000, 100):
        assert write(client, chain(first, 4), b"bob") == 4
        store.written()
    stats = store.stats()
    assert (stats.num_tenants, stats.used_slots) == (2, 6 + NUM_SLOTS // 2)
    assert stats.quota_evictions == 28
    assert client.exchange(acquire=chain(0, 6), tenant=b"alice").num_ready == 6
    # What bob lost of memory is still on the disk.
    assert read(client, chain(100, 4), b"bob") == 4
    assert store.stats().used_slots == 6 + NUM_SLOTS // 2


def test_no_tenant_can_read_what_only_another_knows(store: Store) -> None:
    store.start()
    alice = store.client("alice")
    salted = StoreClient(
        store.path,
        msgspec.structs.replace(FINGERPRINT, salt="bob"),
        client_name="bob",
        timeout_s=DEADLINE_S,
    )
    keys = chain(0, 4)
    write(alice, keys)
    store.written()
    assert salted.lookup(keys) == [Lookup.MISS] * 4
    assert salted.exchange(acquire=keys).lease is None
    salted.close()


def test_memory_is_verified_when_asked_for(store: Store) -> None:
    store.start("--verify-memory")
    client = store.client()
    keys = chain(0, 3)
    write(client, keys)
    store.written()
    exchanged = client.exchange(acquire=keys)
    assert exchanged.lease is not None
    view = client.view()
    view.memory[view.offset_bytes(exchanged.slots[1])] ^= 255
    client.release(exchanged.lease)
    # The block that changed in memory comes from the disk again.
    assert read(client, keys) == 3
    assert store.stats().corrupt_blocks == 1
    assert "its memory has changed" in store.log.read_text()


# ---- what a user can get wrong: a line in the log and in status, and memory serves on


def broken_folder(tmp_path: Path, kind: str) -> Path:
    if kind == "a file":
        (tmp_path / "file").touch()
        return tmp_path / "file"
    if kind == "not writable":
        return Path("/proc/banaserve")
    folder = tmp_path / "other"
    folder.mkdir()
    if kind == "another version":
        (folder / "format").write_bytes(b"banaserve ssd files 999999\n")
    else:
        (folder / "thesis.tex").touch()
    return folder


@pytest.mark.parametrize("kind", ["a file", "not writable", "another version", "not ours"])
def test_a_folder_that_cannot_be_used(
    store: Store, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken_folder(tmp_path, kind)
    store.start(ssd=folder)
    client = store.client()
    write(client, chain(0, 4))
    assert read(client, chain(0, 4)) == 4
    stats = store.tier().stats
    assert not stats.available
    assert str(folder) in stats.problem
    lines = [line for line in store.log.read_text().splitlines() if "without the ssd tier" in line]
    assert len(lines) == 1
    main(["kvstore", "status", "--socket", str(store.path)])
    assert f"out of service: {stats.problem}" in capsys.readouterr().out


def test_a_second_store_on_the_same_folder(store: Store, tmp_path: Path, stack: ExitStack) -> None:
    store.start()
    second = Store(tmp_path, stack, "second")
    second.start()
    assert not second.tier().stats.available
    assert store.tier().stats.available
    client = second.client()
    write(client, chain(0, 4))
    assert read(client, chain(0, 4)) == 4
    write(store.client(), chain(0, 4))
    store.written()
    store.stop()
    assert check_folder(store.ssd).num_ok == 4


# ---- commands


def test_status_shows_each_tier(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.start()
    client = store.client()
    write(client, chain(0, 4))
    store.written()
    main(["kvstore", "status", "--socket", str(store.path)])
    table = capsys.readouterr().out
    assert "of 16 MiB used, 4 blocks" in table
    assert "4 written, 0 waiting" in table
    main(["kvstore", "status", "--socket", str(store.path), "--json"])
    assert json.loads(capsys.readouterr().out)["tiers"][0]["demoted"] == 4


def test_metrics_name_every_number_of_a_tier(store: Store) -> None:
    store.start()
    report = store.tier()
    text = prometheus_text(store.stats())
    fields = {*report.__struct_fields__, *report.stats.__struct_fields__}
    for field in fields - {"stats", "name", "problem", "keeps"}:
        names = (f"banaserve_kvstore_tier_{field}", f"banaserve_kvstore_tier_{field}_total")
        assert any(f'\n{name}{{tier="ssd"}} ' in text for name in names), field


def test_clear_empties_the_disk_too(store: Store) -> None:
    store.start()
    client = store.client()
    write(client, chain(0, 4))
    store.written()
    cleared = clear_store(store.path, DEADLINE_S)
    assert (cleared.num_dropped, cleared.num_dropped_from_tiers) == (4, 4)
    assert client.lookup(chain(0, 4)) == [Lookup.MISS] * 4
    store.stop()
    store.start()
    eventually(lambda: client.stats() is not None)
    assert client.lookup(chain(0, 4)) == [Lookup.MISS] * 4


def test_check_finds_a_flipped_bit(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.start()
    write(store.client(), chain(0, 4))
    store.stop()
    assert main(["kvstore", "check", "--ssd", str(store.ssd)]) == 0
    assert "4 good" in capsys.readouterr().out
    (path,) = (p for p in store.ssd.glob("blocks/*/*") if block(key(2)) in p.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(block(key(2))) + 100] ^= 4
    path.write_bytes(data)
    assert main(["kvstore", "check", "--ssd", str(store.ssd), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["num_corrupt"] == 1
    # The store never serves it.
    store.start()
    assert read(store.client("again"), chain(0, 4)) == 2
    assert main(["kvstore", "check", "--ssd", str(tmp_path)]) == 2
