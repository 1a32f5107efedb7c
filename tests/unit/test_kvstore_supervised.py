"""The daemon as a supervised child: its options reach it, and its disk outlives it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from banaserve.errors import StoreUnavailableError
from banaserve.kvstore.admin import fetch_stats
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.daemon.supervised import SupervisedStore
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.tiers.ssd.check import check_folder
from fingerprints import FINGERPRINT
from waiting import eventually, until

KEYS = [bytes([number]) * 32 for number in range(4)]
DEADLINE_S = 30.0


async def test_blocks_outlive_a_killed_daemon_and_a_stop(tmp_path: Path) -> None:
    restarted = asyncio.Event()
    options = StoreOptions(size="64KiB", ssd=tmp_path / "ssd", ssd_size="1MiB", tenant_quota=0.5)
    store = SupervisedStore(tmp_path / "kv", options, tmp_path / "log", restarted.set)
    await store.start()
    try:
        assert await store.problems() == []
        client = StoreClient(store.socket_path, FINGERPRINT, client_name="here", timeout_s=10.0)
        slots = client.exchange(reserve=[(key, None) for key in KEYS]).reserved
        assert client.commit([slot for slot in slots if slot is not None])
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.to_thread(
                eventually, lambda: fetch_stats(store.socket_path).tiers[0].demoted == len(KEYS)
            )
            os.kill(store.pid, signal.SIGKILL)
            await restarted.wait()
            await asyncio.to_thread(
                eventually, lambda: client.lookup(KEYS) == [Lookup.HIT] * len(KEYS)
            )
        assert fetch_stats(store.socket_path).used_slots == 0
        client.close()
    finally:
        await store.stop()
    assert not store.socket_path.exists()
    assert check_folder(tmp_path / "ssd").num_ok == len(KEYS)


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
