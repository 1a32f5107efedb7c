"""Who carries transfers out, and in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest

from banaserve.transport.errors import PeerGoneError, TransferCancelledError, TransferTimeoutError
from banaserve.transport.memory import Memory, Plan
from banaserve.transport.regions import remote_region
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.remote_region import MAX_HELP_BYTES, RemoteRegion, Ticket

WAIT_S = 60.0
THREAD = "transport-test-copy"
NOTHING = np.empty(0, np.int64)


def plan(number: int) -> Plan:
    """Its number stands where its bytes do."""
    return Plan(Memory(0, 0), NOTHING, NOTHING, 0, number, True)


class Copies(RemoteRegion):
    """Notes which thread has carried out which plan; the first one waits to be let go."""

    def __init__(self, waiters_help: bool) -> None:
        self.done: list[tuple[int, str]] = []
        self.go_on = threading.Event()
        self.begun = threading.Event()
        self.then: Callable[[int], None] = lambda number: None
        self.never_waits_for_peer = waiters_help
        super().__init__(RegionDescriptor("test", bytes(16), 2**30, 0, "here"), lambda region: True)

    def submit(self, plan: Plan) -> Ticket:
        return self._submit(plan)

    def _carry_out(self, ticket: Ticket) -> None:
        if not ticket.plan.epoch:
            self.begun.set()
            self.go_on.wait(WAIT_S)
        ticket.check()
        self.then(ticket.plan.epoch)
        self.done.append((ticket.plan.epoch, threading.current_thread().name))

    def _disconnect(self) -> None:
        self.go_on.set()

    def _break_off(self) -> None:
        self.go_on.set()


@pytest.mark.parametrize("waiters_help", [True, False])
def test_transfers_end_in_the_order_of_their_submission(waiters_help: bool) -> None:
    copies = Copies(waiters_help)
    tickets = [copies.submit(plan(number)) for number in range(40)]
    assert copies.begun.wait(WAIT_S)
    waiting = [threading.Thread(target=t.wait, args=(WAIT_S,)) for t in reversed(tickets)]
    for thread in waiting:
        thread.start()
    copies.go_on.set()
    for thread in waiting:
        thread.join()
    assert [number for number, _ in copies.done] == list(range(40))
    if not waiters_help:
        assert {name for _, name in copies.done} == {THREAD}
    copies.close()


def test_a_transfer_that_somebody_helps_with_can_be_cancelled_and_closed() -> None:
    copies = Copies(True)
    first, second = copies.submit(plan(0)), copies.submit(plan(1))
    assert copies.begun.wait(WAIT_S)
    canceller = threading.Thread(target=first.cancel)
    canceller.start()
    with pytest.raises(TransferCancelledError):
        first.wait(WAIT_S)
    second.wait(WAIT_S)
    canceller.join()
    copies.close()
    with pytest.raises(PeerGoneError):
        copies.submit(plan(2))


def test_a_large_transfer_does_not_keep_who_waits_for_it_past_the_deadline() -> None:
    copies = Copies(True)
    offsets = np.zeros(2, np.int64)
    large = Plan(Memory(0, 0), offsets, offsets, MAX_HELP_BYTES // 2 + 1, 0, True)
    with copies._changed:  # so that the thread cannot take it first
        ticket = copies.submit(large)
        with pytest.raises(TransferTimeoutError):
            ticket.wait(0.01)
    copies.go_on.set()
    ticket.wait(WAIT_S)
    assert copies.done == [(0, THREAD)]
    copies.close()


def test_a_helper_that_is_interrupted_leaves_nobody_waiting() -> None:
    copies = Copies(True)

    def interrupt(number: int) -> None:
        if threading.current_thread().name != THREAD:
            raise KeyboardInterrupt

    copies.then = interrupt
    for number in range(1, 10_000):  # until this thread is the one that does it
        ticket = copies.submit(plan(number))
        try:
            ticket.wait(WAIT_S)
        except KeyboardInterrupt:
            break
    with pytest.raises(PeerGoneError, match="broken off"):
        ticket.wait(WAIT_S)
    copies.close()


class StallingEvent(threading.Event):
    """An event whose first waits end late, as if the whole machine had stood still.

    Args:
        num_stalls: Number of these waits.
        resume: Called at the first wait after them.
    """

    def __init__(self, num_stalls: int, resume: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._resume = num_stalls, resume

    def wait(self, timeout: float | None = None) -> bool:
        self._left -= 1
        if self._left >= 0:
            return False
        self._resume()
        return super().wait(WAIT_S)


@pytest.mark.parametrize(("num_stalls", "is_late"), [(3, False), (4, True)])
def test_a_stall_of_the_whole_machine_does_not_count_against_a_copy(
    monkeypatch: pytest.MonkeyPatch, num_stalls: int, is_late: bool
) -> None:
    copies = Copies(False)
    waited = StallingEvent(num_stalls, copies.go_on.set)
    monkeypatch.setattr(remote_region.threading, "Event", lambda: waited)
    ticket = copies.submit(plan(0))
    monkeypatch.undo()
    assert copies.begun.wait(WAIT_S)
    with pytest.raises(TransferTimeoutError) if is_late else nullcontext():
        ticket.wait(1.0)  # in four parts
    copies.close()
