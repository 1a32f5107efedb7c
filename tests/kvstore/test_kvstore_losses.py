"""Clients and daemons that die, hang or lose each other, and what becomes of slots and leases."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve.base.errors import StoreUnavailableError
from banaserve.base.platform import linux
from banaserve.kvstore.client import channel
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.pool import PoolView
from store_rig import FINGERPRINT, KEYS, Store, opened, read, reserve, write
from waiting import DEADLINE_S, eventually


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as store:
        yield store


@pytest.mark.parametrize("inherited", [False, True], ids=["alone", "socket-inherited"])
def test_a_killed_client_loses_its_leases_and_reservations(store: Store, inherited: bool) -> None:
    write(store.client(), KEYS[:4])
    child = store.child(
        f"""
        c.exchange(acquire=KEYS[:4], reserve=[(key, None) for key in KEYS[10:13]])
        if {inherited} and os.fork() == 0:
            os.close(0), os.close(1), signal.alarm(600), signal.pause()
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


def test_what_a_store_that_is_away_was_to_be_told_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "_MAX_UNTOLD", 3)
    client = StoreClient(tmp_path / "none.sock", FINGERPRINT, client_name="alone")
    for hold in range(10):
        client.end_hold(hold)
    assert [said.hold for said in client._link._untold] == [7, 8, 9]


def test_a_store_that_hangs_is_not_waited_for(store: Store) -> None:
    client = store.client(timeout_s=0.05)
    os.kill(store.process.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailableError, match="nobody answers"):
        client.connect()
    assert client.lookup(KEYS[:1]) == [Lookup.MISS]


def test_a_store_that_has_gone_can_have_its_memory_back(store: Store) -> None:
    client = StoreClient(
        store.path, FINGERPRINT, client_name="here", populate=False, timeout_s=DEADLINE_S
    )
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


def test_where_the_kernel_maps_no_pages_ahead_a_client_touches_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may be writing to them: a byte that is read and put back could undo theirs."""
    monkeypatch.setattr(linux, "populate", lambda address, num_bytes: False)
    fd = os.memfd_create("pool")
    os.ftruncate(fd, 4 * PAGE_BYTES)
    view = PoolView(fd, 4 * PAGE_BYTES, 1, FINGERPRINT)
    view.populate_in_background()
    eventually(lambda: all(t.name != "kvstore-populate" for t in threading.enumerate()))
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


def mapped_pools() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:banaserve-kvstore" in line}


def test_who_reads_no_block_keeps_no_memory(store: Store) -> None:
    before = mapped_pools()  # those of earlier tests may go meanwhile
    asking = StoreClient(
        store.path, FINGERPRINT, client_name="asking", maps_pool=False, timeout_s=DEADLINE_S
    )
    asking.connect()
    assert mapped_pools() <= before
    store.client().connect()
    assert len(mapped_pools() - before) == 1
    write(store.client(), KEYS[:1])
    exchanged = asking.exchange(acquire=KEYS[:1])
    assert asking.arrivals(exchanged.slots) == [Lookup.HIT]
    with pytest.raises(StoreUnavailableError):
        asking.view()
    asking.close()
