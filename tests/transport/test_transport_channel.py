"""What channels promise, between two real processes."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transport_faults as faults
import transport_peer
from banaserve.transport.channels import connect as connecting
from banaserve.transport.channels import frames
from banaserve.transport.channels.connect import accept_tcp, connect, over_tcp, tcp_address
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.interface import Message, Tensor, TransportOptions
from banaserve.transport.threaded_server import listen_tcp
from depth import num_examples
from forked import Forked
from ports import free_port

WAIT_S = 60.0


class Echo:
    """A process that answers each request with itself."""

    def __init__(self, kind, folder):
        self.options = TransportOptions(folder=str(folder), secret=secrets.token_bytes(32))
        folder, secret = self.options.folder, self.options.secret
        self.process = Forked(transport_peer.echo, kind, folder, secret, pipes=True)
        self.address = self.process.stdout.readline().strip()

    def connect(self):
        return connect(self.address, self.options, WAIT_S)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="module", params=["unix", "tcp"])
def echo(request, tmp_path_factory):
    echo = Echo(request.param, tmp_path_factory.mktemp("c"))
    yield echo
    echo.end()


@pytest.fixture
def doomed(echo, tmp_path):
    """A process of one test's own, to be killed or stopped."""
    own = Echo(echo.address.partition(":")[0], tmp_path)
    yield own
    own.end()


@pytest.fixture
def channel(echo):
    channel = echo.connect()
    yield channel
    channel.close()


def tensor(num_bytes, dtype="uint8", seed=0):
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return Tensor(dtype, (num_bytes // frames.ITEM_BYTES[dtype],), data)


TENSORS = st.builds(
    lambda dtype, shape, seed: Tensor(
        dtype,
        tuple(shape),
        tensor(int(np.prod(shape, dtype=int)) * frames.ITEM_BYTES[dtype], seed=seed).data,
    ),
    st.sampled_from(sorted(frames.ITEM_BYTES)),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(0, 99),
)


def test_a_request_comes_back_as_it_was_sent(channel):
    @settings(max_examples=num_examples(50))
    @given(body=st.binary(max_size=300), tensors=st.lists(TENSORS, max_size=5))
    def run(body, tensors):
        answer = channel.call(Message(body, tuple(tensors)), WAIT_S)
        assert answer.body == body
        assert len(answer.tensors) == len(tensors)
        for got, sent in zip(answer.tensors, tensors, strict=True):
            assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
            assert np.array_equal(got.data, sent.data)
            assert got.data.flags.writeable

    run()


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 65536, 2**20 + 1, 10 * 2**20])
def test_tensors_of_any_size_come_back(channel, num_bytes):
    sent = tensor(num_bytes)
    got = channel.call(Message(b"", (sent,)), WAIT_S).tensors[0]
    assert np.array_equal(got.data, sent.data)


@pytest.mark.parametrize(
    "message",
    [
        Message(bytes(frames.MAX_HEADER_BYTES)),
        Message(b"", (Tensor("object", (1,), np.zeros(8, np.uint8)),)),
        Message(b"", (Tensor("float32", (2,), np.zeros(7, np.uint8)),)),
        Message(b"", (Tensor("uint8", (-1,), np.zeros(1, np.uint8)),)),
        Message(b"", (Tensor("uint8", (4,), np.zeros(8, np.uint8)[::2]),)),
        Message(b"", (Tensor("uint8", (2**40,), np.zeros(1, np.uint8)),)),
        Message(b"", epoch=-1),
    ],
)
def test_a_message_that_no_peer_would_accept_is_not_sent(channel, message):
    with pytest.raises(RefusedError):
        channel.send(message, WAIT_S)
    assert channel.call(Message(b"still here"), WAIT_S).body == b"still here"


def test_a_stale_request_is_refused_and_a_present_one_is_not(channel):
    assert channel.call(Message(b"", epoch=5), WAIT_S).epoch == 5
    with pytest.raises(StaleEpochError, match="epoch 5"):
        channel.call(Message(b"", epoch=4), WAIT_S)
    assert channel.call(Message(b"", epoch=5), WAIT_S).epoch == 5


def test_a_peer_that_is_killed_is_noticed_by_whoever_waits(doomed):
    channel = doomed.connect()
    os.kill(doomed.process.pid, signal.SIGKILL)
    with pytest.raises(PeerGoneError):
        channel.receive(WAIT_S)
    with pytest.raises(PeerGoneError):
        channel.call(Message(b""), WAIT_S)
    channel.close()
    doomed.process.wait()
    with pytest.raises(PeerGoneError):
        doomed.connect()


def test_a_peer_that_stands_still_costs_a_timeout_and_its_late_reply_is_dropped(doomed):
    channel = doomed.connect()
    os.kill(doomed.process.pid, signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError):
        channel.call(Message(b"late"), 0.05)
    os.kill(doomed.process.pid, signal.SIGCONT)
    assert channel.call(Message(b"in time"), WAIT_S).body == b"in time"
    assert channel.num_refused == 1
    channel.close()


def test_a_peer_that_does_not_read_costs_a_timeout_and_the_channel(doomed):
    channel = doomed.connect()
    os.kill(doomed.process.pid, signal.SIGSTOP)
    with pytest.raises(TransferTimeoutError):
        channel.send(Message(b"", (tensor(64 * 2**20),)), 0.1)
    with pytest.raises(PeerGoneError):
        channel.send(Message(b""), WAIT_S)


def test_hostile_bytes_cost_only_their_own_connection(echo, channel):
    random = np.random.default_rng(3)
    kind, _, rest = echo.address.partition(":")
    for _ in range(20):
        if kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(rest)
        else:
            sock = socket.create_connection(("127.0.0.1", int(rest.rpartition(":")[2])))
        with sock, suppress(OSError):
            sock.sendall(random.bytes(int(random.integers(1, 3000))))
    # The listener serves one peer at a time: this one is served when the others are gone.
    channel.close()
    again = echo.connect()
    assert again.call(Message(b"here"), WAIT_S).body == b"here"
    again.close()


def test_another_secret_is_refused(tmp_path):
    listener = listen_tcp("127.0.0.1")
    stranger = TransportOptions(folder=str(tmp_path), secret=b"b" * 16)
    seen = []

    def accept():
        try:
            deadline = time.monotonic() + WAIT_S
            over_tcp(listener.accept()[0], b"a" * 16, deadline, listening=True)
        except TransportError as error:
            seen.append(type(error))

    thread = threading.Thread(target=accept)
    thread.start()
    with pytest.raises(RefusedError, match="secret"):
        connect(tcp_address(listener), stranger, WAIT_S)
    thread.join()
    assert seen == [PeerGoneError]
    listener.close()


def test_nobody_there_is_said_at_once(tmp_path):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    with pytest.raises(PeerGoneError):
        connect(f"unix:{tmp_path}/gone.sock", options, WAIT_S)
    with pytest.raises(RefusedError):
        connect("http://x", options, WAIT_S)
    with pytest.raises(RefusedError):
        connect("tcp:nowhere", options, WAIT_S)


@pytest.mark.parametrize("kind", ["duplicate", "delay", "corrupt"])
def test_the_faulty_channel_sends_what_its_kind_says(channel, kind):
    wrong = faults.FaultyChannel(channel, faults.Faults(kind, at=[1], delay_s=0.001))
    assert wrong.call(Message(b"first"), WAIT_S).body == b"first"
    second = wrong.call(Message(b"second"), WAIT_S).body
    assert (second == b"second") is (kind != "corrupt")
    assert wrong.call(Message(b"third"), WAIT_S).body == b"third"


@pytest.mark.parametrize("kind", ["drop", "stall"])
def test_what_the_faulty_channel_loses_is_a_timeout(channel, kind):
    wrong = faults.FaultyChannel(channel, faults.Faults(kind, at=[0]))
    with pytest.raises(TransferTimeoutError):
        wrong.call(Message(b"first"), WAIT_S)
    assert wrong.call(Message(b"second"), WAIT_S).body == b"second"


def test_the_faulty_channel_kills_the_peer(doomed):
    wrong = faults.FaultyChannel(doomed.connect(), faults.Faults("kill", pid=doomed.process.pid))
    with pytest.raises(PeerGoneError):
        wrong.call(Message(b""), WAIT_S)


def test_the_same_seed_makes_the_same_operations_go_wrong():
    runs = [faults.Faults("drop", seed=7, chance=0.3) for _ in range(2)]
    for run in runs:
        for _ in range(50):
            run.strikes()
    assert runs[0].done == runs[1].done
    assert 0 < len(runs[0].done) < 50


def test_the_one_that_is_waited_for_comes_behind_strangers(tmp_path, monkeypatch):
    monkeypatch.setattr(connecting, "_STRANGER_S", 3600.0)
    options = TransportOptions(folder=str(tmp_path), secret=b"a" * 16)
    other = TransportOptions(folder=str(tmp_path), secret=b"b" * 16)
    port, found = free_port(), []
    waiting = threading.Thread(
        target=lambda: found.append(accept_tcp(f"127.0.0.1:{port}", options, WAIT_S))
    )
    waiting.start()
    strangers = []

    def asked(known):
        with suppress(PeerGoneError):
            return connect(f"tcp:127.0.0.1:{port}", known, WAIT_S)

    while not strangers:
        with suppress(OSError):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    with pytest.raises(TransportError):
        connect(f"tcp:127.0.0.1:{port}", other, WAIT_S)
    silent = socket.create_connection(("127.0.0.1", port))
    ours = asked(options)
    waiting.join()
    ours.send(Message(b"here"), WAIT_S)
    assert found[0].receive(WAIT_S).body == b"here"
    for one in (ours, found[0], silent, *strangers):
        one.close()


def test_nobody_comes_or_the_address_is_taken(tmp_path):
    options = TransportOptions(folder=str(tmp_path), secret=b"a" * 16)
    with pytest.raises(TransferTimeoutError):
        accept_tcp(f"127.0.0.1:{free_port()}", options, 0.05)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PeerGoneError, match="use"):
        accept_tcp("{}:{}".format(*taken.getsockname()), options, WAIT_S)
