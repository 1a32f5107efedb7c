"""Queues between an engine core and its ranks, whose readers sleep between two steps."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from banaserve.engine.compat.runner.hooks import shorten_spinning
from depth import IS_LONG
from waiting import lasts

NUM_MESSAGES = 2000 if IS_LONG else 300
DEADLINE_S = 60.0


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[MessageQueue]:
    monkeypatch.setattr(SpinCondition, "__init__", SpinCondition.__init__)
    shorten_spinning()
    made = MessageQueue(2, 2)
    yield made
    made.shutdown()


@pytest.mark.parametrize("longest_pause_s", [0.0005, 0.012])
def test_no_reader_misses_a_message_whenever_it_has_gone_to_sleep(
    writer: MessageQueue, longest_pause_s: float
) -> None:
    """Pauses are shorter and longer than a reader looks before it sleeps."""
    came: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    handle = writer.export_handle()

    def read(rank: int) -> None:
        reader = MessageQueue.create_from_handle(handle, rank)
        reader.wait_until_ready()
        for _ in range(NUM_MESSAGES):
            came.put((rank, reader.dequeue(timeout=DEADLINE_S)))

    readers = [threading.Thread(target=read, args=(rank,), daemon=True) for rank in range(2)]
    for one in readers:
        one.start()
    writer.wait_until_ready()
    draws = random.Random(7)
    for number in range(NUM_MESSAGES):
        writer.enqueue(number)
        lasts(draws.uniform(0.0, longest_pause_s))
    for one in readers:
        one.join(DEADLINE_S)
    found = [came.get(timeout=DEADLINE_S) for _ in range(2 * NUM_MESSAGES)]
    for rank in range(2):
        assert [number for of, number in found if of == rank] == list(range(NUM_MESSAGES))
