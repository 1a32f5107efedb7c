"""Clients of a real daemon: what they write, read, are told and are refused."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest

from banaserve.base.errors import FingerprintError, StoreUnavailableError
from banaserve.kvstore.client.admin import clear_store
from banaserve.kvstore.daemon import metrics
from banaserve.kvstore.daemon.metrics import MetricsServer, prometheus_text
from banaserve.kvstore.leases import Lookup, Slot
from store_rig import DEADLINE_S, FINGERPRINT, KEYS, NUM_SLOTS, Store, opened, read, reserve, write
from waiting import eventually


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as store:
        yield store


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


def test_a_store_that_is_late_is_waited_for(store: Store) -> None:
    impatient = store.client("impatient", timeout_s=0.05)
    patient = store.client("patient", timeout_s=0.05)
    os.kill(store.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailableError, match="nobody answers"):
        impatient.connect()
    threading.Timer(0.3, os.kill, (store.process.pid, signal.SIGCONT)).start()
    patient.connect(within_s=DEADLINE_S)
    assert patient.lookup(KEYS[:1]) == [Lookup.MISS]


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
    clear_store(store.path, DEADLINE_S)
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
    cleared = clear_store(store.path, DEADLINE_S)
    assert (cleared.num_dropped, cleared.num_dropped_from_tiers) == (4, 0)
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


def test_another_hash_seed_is_refused_at_the_first_call(store: Store) -> None:
    store.client("one").connect()
    other = store.client("two", msgspec.structs.replace(FINGERPRINT, probe="dead"))
    with pytest.raises(FingerprintError, match="probe"):
        other.lookup(KEYS[:1])
    with pytest.raises(FingerprintError, match="probe"):
        other.connect()


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


def test_a_store_without_descriptors_outlives_a_client_of_several_processes(
    store: Store,
) -> None:
    for _ in range(3):
        store.child("c.connect(); wait()")
    owner = store.child("c.exchange(reserve=[(KEYS[0], None)]); wait()")
    pid = store.process.pid
    descriptors = os.listdir(f"/proc/{pid}/fd")
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(map(int, descriptors)) + 1, before[1]))
    owner.kill()
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) < len(descriptors))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    stats = store.stats()
    assert (stats.clients, stats.writing_slots, stats.quarantined_slots) == (3, 1, 1)


def test_the_socket_is_private(store: Store) -> None:
    assert store.path.stat().st_mode & 0o777 == 0o600


def test_metrics_name_every_number(store: Store) -> None:
    stats = store.stats()
    text = prometheus_text(stats)
    named = {line.split()[0] for line in text.splitlines() if not line.startswith("#")}
    for field in set(stats.__struct_fields__) - {"generation", "slot_bytes", "tiers"}:
        assert f"banaserve_kvstore_{field}" in {name.removesuffix("_total") for name in named}


def test_who_asks_for_metrics_and_says_nothing_is_disconnected(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_S", 0.01)
    server = MetricsServer(store.path, 0)
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as silent:
        assert silent.recv(1) == b""
    server.close()


def test_metrics_are_served(store: Store) -> None:
    server = MetricsServer(store.path, 0)
    with urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        assert b"banaserve_kvstore_capacity_bytes 65536\n" in answer.read()
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"http://127.0.0.1:{server.port}/")
    server.close()
