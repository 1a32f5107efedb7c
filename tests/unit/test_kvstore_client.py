"""A real daemon process and its clients, some of which die without warning."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest

from banaserve.errors import FingerprintError, StoreUnavailableError
from banaserve.kvstore.admin import clear_store, fetch_stats
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.interface import Lookup, Slot
from banaserve.kvstore.metrics import MetricsServer, prometheus_text
from banaserve.kvstore.stats import StoreStats
from store_process import start_store
from waiting import eventually

FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    layout="LBHNC",
    page_bytes=2048,
    probe="00ff",
)
NUM_SLOTS = 16
KEYS = [bytes([number]) * 32 for number in range(64)]
DEADLINE_S = 20.0


class Store:
    """A daemon process and the clients that a test connected to it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.path = folder / "store.sock"
        self._stack = stack
        self.start()

    def start(self) -> None:
        size = NUM_SLOTS * FINGERPRINT.slot_bytes
        self.process = start_store(self.path, size, "--poison-free-slots")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(
        self, name: str = "here", fingerprint: Fingerprint = FINGERPRINT, timeout_s: float = 10.0
    ) -> StoreClient:
        client = StoreClient(self.path, fingerprint, client_name=name, timeout_s=timeout_s)
        self._stack.callback(client.close)
        return client

    def child(self, program: str) -> subprocess.Popen[str]:
        """A process that has run ``program`` up to its line ``wait()``, with client ``c``."""
        fingerprint = msgspec.json.encode(msgspec.to_builtins(FINGERPRINT)).decode()
        prelude = f"""
            import msgspec, os, sys, time
            from banaserve.kvstore.client import StoreClient
            from banaserve.kvstore.fingerprint import Fingerprint
            KEYS = [bytes([number]) * 32 for number in range(64)]
            fingerprint = msgspec.convert(msgspec.json.decode({fingerprint!r}), Fingerprint)
            c = StoreClient({str(self.path)!r}, fingerprint, client_name="child", timeout_s=10.0)
            def wait():
                print("waiting", flush=True)
                sys.stdin.readline()
        """
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(child)
        self._stack.callback(child.kill)
        assert child.stdout is not None
        assert child.stdout.readline() == "waiting\n"
        return child

    def stats(self) -> StoreStats:
        return fetch_stats(self.path, DEADLINE_S)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        store = Store(tmp_path, stack)
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


def test_what_one_client_writes_another_reads(store: Store) -> None:
    writer, reader = store.client("writer"), store.client("reader")
    write(writer, KEYS[:3])
    expected = [key[:1] * FINGERPRINT.slot_bytes for key in KEYS[:3]]
    assert read(reader, KEYS[:5]) == expected
    assert reader.lookup(KEYS[2:4]) == [Lookup.HIT, Lookup.MISS]
    stats = reader.stats()
    assert stats is not None
    assert (stats.clients, stats.hits, stats.misses) == (2, 3, 2)
    assert (stats.num_leases, stats.num_slots) == (0, NUM_SLOTS)


def test_arrivals_tell_what_is_readable_without_asking(store: Store) -> None:
    client = store.client()
    (slot,) = reserve(client, KEYS[:1])
    assert client.arrivals([slot]) == [Lookup.MISS]
    assert client.commit([slot])
    exchanged = client.exchange(acquire=KEYS[:2])
    assert (list(exchanged.slots), exchanged.num_ready, exchanged.wait_s) == ([slot], 1, 0.0)
    other = Slot(slot.index, slot.generation, slot.serial + 1)
    os.kill(store.process.pid, signal.SIGSTOP)
    assert client.arrivals([slot, other]) == [Lookup.HIT, Lookup.MISS]
    os.kill(store.process.pid, signal.SIGCONT)
    assert exchanged.lease is not None
    client.release(exchanged.lease)
    clear_store(store.path)
    assert client.arrivals([slot]) == [Lookup.MISS]


def test_clients_cannot_write_to_the_board(store: Store) -> None:
    client = store.client()
    client.connect()
    with pytest.raises(TypeError):
        client._board._words[0] = 1  # type: ignore[union-attr]


def test_eviction_keeps_leased_chains(store: Store) -> None:
    client = store.client()
    write(client, KEYS[:8])
    leased = client.exchange(acquire=KEYS[:8]).lease
    assert leased is not None
    for key in KEYS[20:40]:
        write(client, [key])
    assert len(read(client, KEYS[:8])) == 8
    client.release(leased)
    for key in KEYS[40:60]:
        write(client, [key])
    assert client.lookup(KEYS[:8]) == [Lookup.MISS] * 8


def test_clear_and_poison(store: Store) -> None:
    client = store.client()
    write(client, KEYS[:4])
    assert clear_store(store.path) == (4, 0)
    assert client.lookup(KEYS[:4]) == [Lookup.MISS] * 4
    view = client.view()
    assert (view.memory == 0xFF).all()


def test_parts_are_committed_from_several_processes(store: Store) -> None:
    fingerprint = msgspec.structs.replace(FINGERPRINT, num_layers=1, num_parts=2)
    scheduler = store.client("tp", fingerprint)
    workers = [store.client("tp", fingerprint) for _ in range(2)]
    slots = reserve(scheduler, KEYS[:2])
    assert workers[1].commit(slots, part=1)
    assert scheduler.lookup(KEYS[:2]) == [Lookup.PENDING] * 2
    assert workers[0].commit(slots, part=0)
    assert scheduler.lookup(KEYS[:2]) == [Lookup.HIT] * 2
    assert not workers[0].commit(slots, part=0)


def test_bad_terms_are_the_callers_mistake(store: Store) -> None:
    client = store.client()
    with pytest.raises(ValueError, match="tenant"):
        client.exchange(tenant=b"x" * 65)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="compute"):
            client.exchange(compute_block_s=seconds)


@pytest.mark.parametrize(
    "keys", [[b"short"], [b"x" * 65], KEYS * 2000], ids=["short", "long", "many"]
)
def test_bad_keys_are_the_callers_mistake(store: Store, keys: list[bytes]) -> None:
    client = store.client()
    with pytest.raises(ValueError, match="key"):
        client.lookup(keys)
    with pytest.raises(ValueError, match="key"):
        client.exchange(reserve=[(key, None) for key in keys])


def test_threads_share_one_client(store: Store) -> None:
    client = store.client()
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for _ in range(20):
                for key in KEYS[first : first + 3]:
                    if client.lookup([key]) == [Lookup.MISS]:
                        write(client, [key])
                    assert read(client, [key]) in ([], [key[:1] * FINGERPRINT.slot_bytes])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(0, 60, 15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.stats().leased_slots == 0


@pytest.mark.parametrize("inherited", [False, True], ids=["alone", "socket-inherited"])
def test_a_killed_client_loses_its_leases_and_reservations(store: Store, inherited: bool) -> None:
    write(store.client(), KEYS[:4])
    child = store.child(
        f"""
        c.exchange(acquire=KEYS[:4], reserve=[(key, None) for key in KEYS[10:13]])
        if {inherited} and os.fork() == 0:
            os.close(0), os.close(1), time.sleep(600)
        wait()
        """
    )
    stats = store.stats()
    assert (stats.leased_slots, stats.writing_slots) == (4, 3)
    if inherited:
        grandchild = int(Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text())
    child.kill()
    eventually(lambda: store.stats().writing_slots == store.stats().num_leases == 0)
    stats = store.stats()
    assert (stats.used_slots, stats.leased_slots, stats.quarantined_slots) == (4, 0, 0)
    if inherited:
        os.kill(grandchild, signal.SIGKILL)


def test_a_lost_connection_of_a_live_process_keeps_its_slots(store: Store) -> None:
    child = store.child(
        """
        c.exchange(reserve=[(KEYS[0], None)])
        c._link._channel.close()
        wait()
        """
    )
    eventually(lambda: store.stats().clients == 0)
    assert store.stats().quarantined_slots == 1
    child.kill()
    eventually(lambda: store.stats().used_slots == 0)


def test_a_slot_waits_for_all_processes_of_its_client(store: Store) -> None:
    worker = store.child("c.connect(); wait()")
    scheduler = store.child("c.exchange(reserve=[(KEYS[0], None)]); wait()")
    scheduler.kill()
    eventually(lambda: store.stats().quarantined_slots == 1)
    worker.kill()
    eventually(lambda: store.stats().used_slots == 0)


def test_goodbye_gives_everything_back_at_once(store: Store) -> None:
    client = store.client()
    write(client, KEYS[:1])
    client.exchange(acquire=KEYS[:1], reserve=[(KEYS[1], KEYS[0])])
    client.close()
    eventually(lambda: store.stats().clients == 0)
    stats = store.stats()
    assert (stats.num_leases, stats.writing_slots, stats.used_slots) == (0, 0, 1)
    assert client.lookup(KEYS[:1]) == [Lookup.MISS]
    with pytest.raises(StoreUnavailableError):
        client.connect()


def test_a_killed_daemon_means_misses_until_it_is_back(store: Store) -> None:
    client = store.client()
    write(client, KEYS[:2])
    exchanged = client.exchange(acquire=KEYS[:2], reserve=[(KEYS[2], KEYS[1])])
    old_view = client.view()
    old_slots = [slot for slot in exchanged.reserved if slot is not None]
    store.kill()
    assert client.lookup(KEYS[:2]) == [Lookup.MISS] * 2
    away = client.exchange(acquire=KEYS[:2], reserve=[(KEYS[3], None)])
    assert (away.lease, list(away.slots), list(away.reserved)) == (None, [], [None])
    assert not client.commit(old_slots)
    assert client.stats() is None
    assert exchanged.lease is not None
    client.release(exchanged.lease)
    old_view.memory[:] = 1

    store.start()
    eventually(lambda: client.stats() is not None)
    assert client.view().generation != old_view.generation
    assert not client.commit(old_slots)
    assert client.arrivals(old_slots) == [Lookup.MISS]
    with pytest.raises(StoreUnavailableError):
        client.view(old_view.generation)
    with pytest.raises(StoreUnavailableError):
        client.view().offset_bytes(old_slots[0])
    write(client, KEYS[:2])
    assert read(client, KEYS[:2]) == [key[:1] * FINGERPRINT.slot_bytes for key in KEYS[:2]]
    assert (old_view.memory == 1).all()


def test_a_restart_between_two_calls_costs_no_call(store: Store) -> None:
    scheduler, worker = store.client("instance"), store.client("instance")
    worker.connect()
    scheduler.connect()
    store.kill()
    store.start()
    slots = reserve(scheduler, KEYS[:1])
    assert worker.view(slots[0].generation).generation == slots[0].generation
    assert worker.commit(slots)


def test_an_answer_that_comes_too_late_is_given_back(store: Store) -> None:
    write(store.client("writer"), KEYS[:2])
    client = store.client("hasty", timeout_s=0.05)
    eventually(lambda: client.lookup(KEYS[:2]) == [Lookup.HIT] * 2)
    os.kill(store.process.pid, signal.SIGSTOP)
    exchanged = client.exchange(acquire=KEYS[:2], reserve=[(KEYS[5], None)])
    assert exchanged.lease is None
    os.kill(store.process.pid, signal.SIGCONT)
    eventually(lambda: client.lookup(KEYS[:2]) == [Lookup.HIT] * 2)
    eventually(lambda: store.stats().num_leases == 0)
    assert store.stats().writing_slots == 0


def test_another_hash_seed_is_refused_at_the_first_call(store: Store) -> None:
    store.client("one").connect()
    other = store.client("two", msgspec.structs.replace(FINGERPRINT, probe="dead"))
    with pytest.raises(FingerprintError, match="probe"):
        other.lookup(KEYS[:1])
    with pytest.raises(FingerprintError, match="probe"):
        other.connect()


def test_without_a_store_everything_is_a_miss(tmp_path: Path) -> None:
    client = StoreClient(tmp_path / "none.sock", FINGERPRINT, client_name="alone")
    assert client.lookup(KEYS[:1]) == [Lookup.MISS]
    assert client.exchange(acquire=KEYS[:1]).lease is None
    assert client.clear() is None
    with pytest.raises(StoreUnavailableError, match=r"none\.sock"):
        client.connect()
    with pytest.raises(StoreUnavailableError):
        client.view()
    client.close()


def test_a_store_that_hangs_is_not_waited_for(store: Store) -> None:
    client = store.client(timeout_s=0.05)
    os.kill(store.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailableError, match="nobody answers"):
        client.connect()
    assert client.lookup(KEYS[:1]) == [Lookup.MISS]


def test_a_store_that_has_gone_can_have_its_memory_back(store: Store) -> None:
    client = StoreClient(store.path, FINGERPRINT, client_name="here", populate=False)
    memory = weakref.ref(client.view().memory)
    client.let_go_if_lost()
    assert memory() is not None
    store.kill()
    client.let_go_if_lost()
    assert memory() is None
    store.start()
    write(client, KEYS[:1])
    assert len(read(client, KEYS[:1])) == 1
    client.close()


def test_connections_beyond_the_file_descriptors_are_turned_away(store: Store) -> None:
    pid = store.process.pid
    num_open = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open + 4, num_open + 4))
    with ExitStack() as stack:
        socks = []
        for _ in range(8):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.settimeout(DEADLINE_S)
            sock.connect(str(store.path))
            socks.append(sock)
        assert [sock.recv(1) for sock in socks[3:]] == [b""] * 5
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) == num_open)
    assert store.stats().clients == 0


def test_the_socket_is_private(store: Store) -> None:
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_metrics_name_every_number(store: Store) -> None:
    stats = store.stats()
    text = prometheus_text(stats)
    named = {line.split()[0] for line in text.splitlines() if not line.startswith("#")}
    for field in set(stats.__struct_fields__) - {"generation", "slot_bytes", "tiers"}:
        assert f"banaserve_kvstore_{field}" in {name.removesuffix("_total") for name in named}


def test_metrics_are_served(store: Store) -> None:
    server = MetricsServer(store.path, 0)
    with urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        assert b"banaserve_kvstore_capacity_bytes 65536\n" in answer.read()
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{server.port}/")
    server.close()
