"""A stream that several threads let go of at the same time."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import monotonic, sleep

import pytest

from banaserve.transport.errors import PeerGoneError
from banaserve.transport.stream import SocketStream

THREADS = 4


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
    monkeypatch.setattr("banaserve.transport.stream.os.close", close_slowly)
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
