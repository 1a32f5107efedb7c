"""Blocks go from a guest's memory to slots that its host has reserved, over a real store."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from banaserve.base.platform.processes import ProcessHandle
from banaserve.kvstore.leases import Slot
from banaserve.migration.kv.slot_writer import SlotWriter
from banaserve.migration.rpc.messages import SlotCopies, StorePlace
from banaserve.transport.memory import Memory
from store_rig import FINGERPRINT, KEYS, Store, opened
from waiting import eventually

PAGE_BYTES = FINGERPRINT.page_bytes
NUM_BLOCKS = 4
LAYER = 1


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path) as store:
        yield store


@pytest.fixture
def kv() -> np.ndarray:
    """One layer's blocks in a guest, behind a page of something else."""
    blocks = np.repeat(np.arange(NUM_BLOCKS + 1, dtype=np.uint8), PAGE_BYTES)
    return np.ascontiguousarray(blocks)


def writer_of(store: Store, kv: np.ndarray) -> SlotWriter | None:
    place = StorePlace(str(store.path), "host", FINGERPRINT)
    return SlotWriter.open(place, Memory.of(kv), {LAYER: PAGE_BYTES})


def reserve(store: Store) -> tuple[list[Slot], SlotCopies]:
    host = store.client("host")
    pairs = [(KEYS[0], None), (KEYS[1], KEYS[0])]
    slots = [slot for slot in host.exchange(reserve=pairs).reserved if slot is not None]
    copies = SlotCopies(slots[0].generation, (3, 1), tuple(slot.index for slot in slots))
    return slots, copies


def test_layers_of_one_block_come_from_two_processes(store: Store, kv: np.ndarray) -> None:
    writer = writer_of(store, kv)
    assert writer is not None
    host = store.client("host")
    slots, copies = reserve(store)
    view = host.view()
    for slot in slots:
        begin = view.offset_bytes(slot, layer=0)
        view.memory[begin : begin + PAGE_BYTES] = 77
    around: list[int] = []
    assert writer.write(copies, lambda: contextlib.nullcontext(around.append(1)))
    assert around == [1], "each layer within one"
    assert host.commit(slots)
    reader = store.client("reader")
    found = reader.exchange(acquire=KEYS[:2]).slots
    seen = reader.view()
    for slot, number in zip(found, (4, 2), strict=True):
        for layer, value in ((0, 77), (LAYER, number)):
            begin = seen.offset_bytes(slot, layer=layer)
            assert (seen.memory[begin : begin + PAGE_BYTES] == value).all()
    writer.close()


def test_nothing_is_written_to_the_pool_of_another_life(store: Store, kv: np.ndarray) -> None:
    writer = writer_of(store, kv)
    assert writer is not None
    _, copies = reserve(store)
    store.kill()
    writer.let_go_if_lost()
    assert not writer.write(copies, contextlib.nullcontext), "the store is away"
    store.start()
    assert not writer.write(copies, contextlib.nullcontext), "it is another one"
    _, fresh = reserve(store)
    eventually(lambda: writer.write(fresh, contextlib.nullcontext))
    writer.close()


@pytest.mark.parametrize("what", ["block", "slot"])
def test_what_does_not_exist_is_refused(store: Store, kv: np.ndarray, what: str) -> None:
    writer = writer_of(store, kv)
    assert writer is not None
    _, copies = reserve(store)
    far = (copies.blocks[0], 10**6)
    wrong = (
        SlotCopies(copies.generation, far, copies.slots)
        if what == "block"
        else SlotCopies(copies.generation, copies.blocks, far)
    )
    with pytest.raises(ValueError, match="do not lie within"):
        writer.write(wrong, contextlib.nullcontext)
    writer.close()


def test_without_a_store_the_host_saves(tmp_path: Path, kv: np.ndarray) -> None:
    place = StorePlace(str(tmp_path / "nobody"), "host", FINGERPRINT)
    assert SlotWriter.open(place, Memory.of(kv), {LAYER: 0}) is None


def test_slots_of_a_dead_host_are_free_when_its_guest_is_dead_too(store: Store) -> None:
    guest = store.child("c.connect(); wait()")
    host = store.child("c.exchange(reserve=[(KEYS[0], None)]); wait()")
    host.kill()
    host.wait()
    eventually(lambda: store.stats().quarantined_slots == 1)
    guest.kill()
    eventually(lambda: store.stats().used_slots == 0)


def test_a_process_that_stands_still_is_ended(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    handle = ProcessHandle.open(process.pid)
    assert handle is not None
    os.kill(process.pid, signal.SIGSTOP)
    handle.kill()
    assert process.poll() == -signal.SIGKILL
    handle.kill()
    handle.close()
    handle.kill()
    assert ProcessHandle.open(process.pid) is None
