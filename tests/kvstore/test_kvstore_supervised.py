"""The daemon as a supervised child: its options reach it, and its disk outlives it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from banaserve.base.errors import StoreUnavailableError, UserError
from banaserve.base.platform.processes import is_running
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.daemon import supervised
from banaserve.kvstore.daemon.options import PeerOptions, StoreOptions
from banaserve.kvstore.daemon.supervised import StoreTimeouts, SupervisedStore
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.ssd.scan import check_folder
from fingerprints import FINGERPRINT
from ports import free_port
from waiting import eventually, until

pytestmark = pytest.mark.deep

KEYS = [bytes([number]) * 32 for number in range(4)]
DEADLINE_S = 60.0


async def test_blocks_outlive_a_killed_daemon_and_a_stop(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    options = StoreOptions(size="64KiB", ssd=tmp_path / "ssd", ssd_size="1MiB", tenant_quota=0.5)
    store = SupervisedStore(tmp_path / "kv", options, tmp_path / "log", restarted.set)
    await store.start()
    try:
        assert await store.problems() == []
        client = StoreClient(
            store.socket_path, FINGERPRINT, client_name="here", timeout_s=DEADLINE_S
        )
        slots = client.exchange(reserve=[(key, None) for key in KEYS]).reserved
        assert client.commit([slot for slot in slots if slot is not None])
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(
                eventually,
                lambda: fetch_stats(store.socket_path, DEADLINE_S).tiers[0].demoted == len(KEYS),
            )
            os.kill(store.pid, signal.SIGKILL)
            await restarted.wait()
            await asyncio.to_thread(
                eventually, lambda: client.lookup(KEYS) == [Lookup.HIT] * len(KEYS)
            )
        assert fetch_stats(store.socket_path, DEADLINE_S).used_slots == 0
        client.close()
    finally:
        await store.stop()
    assert not store.socket_path.exists()
    assert check_folder(tmp_path / "ssd").num_ok == len(KEYS)


QUICK = StoreTimeouts(probe_s=0.02, answer_s=1.0, stall_s=4.0, spin_s=1e6)


async def test_a_daemon_that_hangs_is_started_again(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    options, log = StoreOptions(size="64KiB"), tmp_path / "log"
    patience = dataclasses.replace(QUICK, stall_s=DEADLINE_S)

    def restart() -> None:
        store._timeouts = patience
        restarted.set()

    store = SupervisedStore(tmp_path / "kv", options, log, restart, patience)
    await store.start()
    # No daemon has so little time to start, which may be long on a slow machine.
    store._timeouts = dataclasses.replace(QUICK, answer_s=0.5, stall_s=1.0)
    try:
        first = store.pid
        os.kill(first, signal.SIGSTOP)
        async with asyncio.timeout(4 * DEADLINE_S):
            await restarted.wait()
        await until(lambda: store.pid != first)
        await asyncio.to_thread(eventually, lambda: answers(store.socket_path))
        assert not is_running(first)
    finally:
        await store.stop()


async def test_peers_that_are_set_outlive_a_restart(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    peers = PeerOptions(f"127.0.0.1:{free_port()}", (), "k" * 16)
    options = StoreOptions(size="64KiB", peers=peers)
    store = SupervisedStore(tmp_path / "kv", options, tmp_path / "log", restarted.set)
    await store.start()

    def problem() -> str:
        return fetch_stats(store.socket_path, DEADLINE_S).tiers[0].stats.problem

    try:
        assert problem() == ""
        await store.set_peers(["127.0.0.1:9"])
        await asyncio.to_thread(eventually, lambda: "127.0.0.1:9" in problem())
        with pytest.raises(UserError, match="write HOST:PORT"):
            await store.set_peers(["nowhere"])
        os.kill(store.pid, signal.SIGKILL)
        await restarted.wait()
        await store.set_peers(["127.0.0.1:10"])  # there may be nobody to be told
        await asyncio.to_thread(eventually, lambda: answers(store.socket_path))
        await asyncio.to_thread(eventually, lambda: "127.0.0.1:10" in problem())
    finally:
        await store.stop()


async def test_a_daemon_without_threads_for_its_peers_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peers = PeerOptions(f"127.0.0.1:{free_port()}", (), "k" * 16)
    options = StoreOptions(size="64KiB", peers=peers)
    store = SupervisedStore(tmp_path / "kv", options, tmp_path / "log", lambda: None)

    def refuse(path: Path, peers: object) -> None:
        raise UserError("not all of its peers are set: can't start new thread")

    monkeypatch.setattr(supervised, "set_peers", refuse)
    await store.set_peers(["127.0.0.1:9"])
    assert "can't start new thread" in caplog.text


async def test_a_daemon_that_hangs_while_it_starts_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = ["sh", "-c", "kill -STOP $$"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: popen(hangs, **how))
    options, log = StoreOptions(size="64KiB"), tmp_path / "log"
    patience = dataclasses.replace(QUICK, stall_s=0.1)
    store = SupervisedStore(tmp_path / "kv", options, log, lambda: None, patience)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(UserError, match="store did not start"):
            await store.start()
    assert not is_running(store.pid)
    await store.stop()


async def test_a_daemon_that_answers_is_left_alone(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    options, log = StoreOptions(size="64KiB"), tmp_path / "log"
    num_answers = 0

    class Counting(SupervisedStore):
        async def _answers(self) -> bool:
            nonlocal num_answers
            does = await super()._answers()
            num_answers += does
            return does

    # Each answer takes a second of the test's own clock, so that no busy machine makes it longer.
    patience = dataclasses.replace(QUICK, answer_s=20.0)
    store = Counting(
        *(tmp_path / "kv", options, log, restarted.set, patience), lambda: float(num_answers)
    )
    await store.start()
    try:
        await until(lambda: num_answers >= 10 * patience.stall_s)
        assert not restarted.is_set()
    finally:
        await store.stop()


async def test_a_tier_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = StoreOptions(size="64KiB", ssd=tmp_path / "file", ssd_size="1MiB")
    store = SupervisedStore(tmp_path / "kv", options, tmp_path / "log", lambda: None)
    await store.start()
    try:
        (problem,) = await store.problems()
    finally:
        await store.stop()
    assert problem.startswith("going on without the store's ssd tier: ")
    assert str(tmp_path / "file") in problem


async def test_a_daemon_that_cannot_be_started_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    store = SupervisedStore(tmp_path / "kv", StoreOptions(size="64KiB"), logs / "log", lambda: None)
    await store.start()
    try:
        first = store.pid
        logs.rename(tmp_path / "away")
        os.kill(first, signal.SIGKILL)
        await until(lambda: "No such file or directory" in caplog.text)
        (tmp_path / "away").rename(logs)
        await until(lambda: store.pid != first)
        await asyncio.to_thread(eventually, lambda: answers(store.socket_path))
    finally:
        await store.stop()


def answers(socket_path: Path) -> bool:
    try:
        return fetch_stats(socket_path).clients == 0
    except StoreUnavailableError:
        return False
