"""A stream that several threads let go of at the same time."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

from banaserve.transport.channels import stream as streams
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import PeerGoneError

THREADS = 4


class StallingPoll:
    """A poll during whose first waits the whole machine stands still: nothing comes, all is late.

    Args:
        clock: Present time in seconds; a stall advances it by ten seconds.
        num_stalls: Number of waits that stall.
        resume: Called after the stalls, before each further wait.
    """

    def __init__(self, clock: list[float], num_stalls: int, resume: Callable[[], None]) -> None:
        self._clock, self._left, self._resume = clock, num_stalls, resume
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        if self._left > 0:
            self._left -= 1
            self._clock[0] += 10.0
            return []
        self._resume()
        return self._poll.poll(timeout_ms)


def test_each_descriptor_is_closed_once_whoever_closes(monkeypatch):
    closed = []
    really_close = os.close

    def close_slowly(number):
        closed.append(number)
        sleep(0.01)
        really_close(number)

    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    pidfd = stream._pidfd
    assert pidfd >= 0
    monkeypatch.setattr("banaserve.transport.channels.stream.os.close", close_slowly)
    begin = Barrier(THREADS)

    def close():
        begin.wait()
        stream.close()

    with ThreadPoolExecutor(THREADS) as pool:
        for ended in [pool.submit(close) for _ in range(THREADS)]:
            ended.result()
    assert closed == [pidfd]
    theirs.close()


def test_who_reads_and_who_writes_notice_that_it_is_closed():
    ours, theirs = socket.socketpair()
    stream = SocketStream(ours)
    far = monotonic() + 60.0
    more_than_fits = bytes(64 * 2**20)
    with ThreadPoolExecutor(2) as pool:
        reads = pool.submit(stream.wait_readable, far)
        writes = pool.submit(stream.write, [more_than_fits], far)
        theirs.recv(1)
        stream.close()
        for ended in (reads, writes):
            with pytest.raises(PeerGoneError):
                ended.result(20.0)
    theirs.close()


@pytest.mark.parametrize(
    "sizes", [(1, 70_000, 3, 0, 5_000), (16_384,) * 40, (4_096, 1), (2,) * 600]
)
def test_parts_are_filled_in_their_turn_and_what_follows_is_kept(sizes):
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    sent = os.urandom(sum(sizes) + 100)
    targets = [bytearray(size) for size in sizes]
    with ThreadPoolExecutor(1) as pool:
        writes = pool.submit(ours.write, [sent], monotonic() + 20.0)
        theirs.read_parts([memoryview(target) for target in targets], monotonic() + 20.0)
        rest = bytearray(100)
        theirs.read_into(memoryview(rest), monotonic() + 20.0)
        writes.result(20.0)
    assert b"".join(targets) + rest == sent
    ours.close()
    theirs.close()


def test_what_is_large_in_all_is_received_where_it_belongs(monkeypatch):
    """Layers of many blocks, each of them small: none is copied out of the stream's own buffer."""
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    monkeypatch.setattr(theirs, "_view", memoryview(bytearray(theirs._view)).toreadonly())
    targets = [bytearray(8_192) for _ in range(16)]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ours.write, [bytes([1]) * 16 * 8_192], monotonic() + 20.0)
        theirs.read_parts([memoryview(target) for target in targets[:-1]], monotonic() + 20.0)
    assert all(target == bytes([1]) * 8_192 for target in targets[:-1])
    ours.close()
    theirs.close()


@pytest.mark.parametrize(("num_stalls", "is_lost"), [(3, False), (4, True)])
def test_a_stall_of_the_whole_machine_does_not_count_against_the_peer(
    monkeypatch, num_stalls, is_lost
):
    ours, theirs = socket.socketpair()
    clock = [0.0]

    def make_poll() -> StallingPoll:
        return StallingPoll(clock, num_stalls, lambda: theirs.sendall(b"rest"))

    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(
        streams, "select", SimpleNamespace(poll=make_poll, POLLIN=1, POLLOUT=4, POLLNVAL=32)
    )
    stream, target = SocketStream(ours), bytearray(4)
    with theirs, pytest.raises(PeerGoneError) if is_lost else nullcontext():
        stream.read_into(memoryview(target), deadline=1.0)  # the wait of a second has four parts
        assert target == b"rest"
    stream.close()
