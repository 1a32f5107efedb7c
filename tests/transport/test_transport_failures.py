"""What every transport promises when something fails, between two real processes."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Event
from time import sleep

import msgspec
import numpy as np
import pytest

import transport_faults as faults
import transport_harness as harness
from banaserve.transport.backends.torch_distributed import _TorchMover
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    TransferCancelledError,
    TransferTimeoutError,
)
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import SLICE_BYTES, Memory
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.registry import create

pytestmark = pytest.mark.deep

side, doomed = harness.side, harness.doomed
WAIT_S, REGION_BYTES = harness.WAIT_S, harness.REGION_BYTES
digest, random_bytes = harness.digest, harness.random_bytes


def test_a_cancelled_transfer_ends_and_those_before_it_arrive(side, monkeypatch):
    num_bytes = 16 * SLICE_BYTES
    key, remote = side.open_new(num_bytes=num_bytes)
    sent = Memory.of(np.ones(num_bytes, np.uint8))
    carry_out, may_begin = remote._carry_out, Event()

    def wait_and_carry_out(ticket):
        may_begin.wait(WAIT_S)
        carry_out(ticket)

    monkeypatch.setattr(remote, "_carry_out", wait_and_carry_out)
    first = remote.submit_write(sent, [0], [0], num_bytes, 1)
    second = remote.submit_write(sent, [0], [0], num_bytes, 1)
    # A busy machine may keep this thread from running until both would have ended.
    assert second.cancel()
    may_begin.set()
    with pytest.raises(TransferCancelledError):
        second.wait(WAIT_S)
    first.wait(WAIT_S)
    assert not first.cancel()
    assert side.peer("digest", key, first=0, end=num_bytes) == digest(sent.view())
    remote.close()


def test_a_peer_that_is_killed_in_mid_copy_is_noticed(side, doomed):
    num_bytes = 16 * SLICE_BYTES
    _, descriptor = doomed.offer(num_bytes=num_bytes)
    remote = side.transport.open(descriptor, WAIT_S)
    sent = Memory.of(np.ones(num_bytes, np.uint8))
    tickets = [remote.submit_write(sent, [0], [0], num_bytes, 1) for _ in range(20)]
    tickets[0].wait(WAIT_S)
    os.kill(doomed.process.pid, signal.SIGKILL)
    with suppress(PeerGoneError):  # on a busy machine all of it may be done by then
        tickets[-1].wait(WAIT_S)
    doomed.process.wait()  # until then the kernel itself may still copy into its memory
    with pytest.raises(PeerGoneError):
        remote.submit_write(sent, [0], [0], 1, 1).wait(WAIT_S)
    remote.close()
    with pytest.raises(PeerGoneError):
        side.transport.open(descriptor, WAIT_S)


def test_a_peer_that_stands_still_costs_a_timeout_or_nothing(side, doomed):
    num_bytes = 8 * SLICE_BYTES
    _, descriptor = doomed.offer(num_bytes=num_bytes)
    remote = side.transport.open(descriptor, WAIT_S)
    sent = Memory.of(np.ones(num_bytes, np.uint8))
    os.kill(doomed.process.pid, signal.SIGSTOP)
    ticket = remote.submit_write(sent, [0], [0], num_bytes, 1)
    if side.name in harness.BY_KERNEL:
        ticket.wait(WAIT_S)  # Nobody there has to do anything.
    else:
        with pytest.raises(TransferTimeoutError):
            ticket.wait(0.2)
        assert ticket.cancel()
        with pytest.raises(TransferCancelledError):
            ticket.wait(0.0)
    remote.close()


@pytest.mark.parametrize("writes", [False, True])
def test_a_transfer_is_cancelled_while_the_group_waits_for_a_peer_that_stands_still(
    side, doomed, monkeypatch, writes
):
    if side.name != "torch_distributed":
        pytest.skip("its bytes do not travel by a group")
    # A send that has begun cannot be broken off: it ends with this.
    monkeypatch.setattr(
        "banaserve.transport.backends.torch_distributed._TIMEOUT", timedelta(seconds=3)
    )
    num_bytes = 2 * SLICE_BYTES
    _, descriptor = doomed.offer(num_bytes=num_bytes)
    remote = side.transport.open(descriptor, WAIT_S)
    waits = Event()
    exchange = _TorchMover._exchange

    def stop_it_first(mover, *given, **named):
        stop(doomed.process.pid)
        waits.set()
        exchange(mover, *given, **named)

    monkeypatch.setattr(_TorchMover, "_exchange", stop_it_first)
    submit = remote.submit_write if writes else remote.submit_read
    ticket = submit(Memory.of(np.ones(num_bytes, np.uint8)), [0], [0], num_bytes, 1)
    assert waits.wait(WAIT_S)
    with pytest.raises(TransferTimeoutError):
        ticket.wait(0.2)
    assert ticket.cancel()
    with pytest.raises(PeerGoneError, match="broken off"):
        submit(Memory.of(np.ones(1, np.uint8)), [0], [0], 1, 1).wait(WAIT_S)
    remote.close()


def stop(pid):
    """Stop a process and return when all its threads stand still."""
    os.kill(pid, signal.SIGSTOP)
    while any(
        status.read_text().rpartition(")")[2].split()[0] != "T"
        for status in Path(f"/proc/{pid}/task").glob("*/stat")
    ):
        sleep(0.001)


def test_a_peer_that_is_killed_before_the_groups_have_met_is_noticed(side, doomed, monkeypatch):
    if side.name != "torch_distributed":
        pytest.skip("there is nothing to wait for")
    _, descriptor = doomed.offer()

    def never(*_, **__):
        os.kill(doomed.process.pid, signal.SIGKILL)
        Event().wait(WAIT_S)
        raise RuntimeError("nobody has looked")

    monkeypatch.setattr("banaserve.transport.backends.torch_distributed.dist.TCPStore", never)
    with pytest.raises(PeerGoneError, match="peer has closed"):
        side.transport.open(descriptor, WAIT_S)


def test_nobody_with_another_secret_opens_a_region(side, tmp_path):
    if side.name in harness.BY_KERNEL:
        pytest.skip("the kernel names the peer; there is no secret")
    _, descriptor = side.peer.offer()
    options = TransportOptions(folder=str(tmp_path), secret=bytes(32))
    stranger = harness.transport_peer.make(side.name, options)
    with pytest.raises(RefusedError):
        stranger.open(descriptor, WAIT_S)
    stranger.close()


def test_hostile_bytes_harm_nobody_else(side):
    key, descriptor = side.peer.offer()
    random = np.random.default_rng(5)
    for _ in range(20):
        with suppress(OSError), raw_connection(descriptor) as sock:
            sock.settimeout(0.2)
            sock.sendall(random.bytes(int(random.integers(1, 4000))))
            sock.recv(100)
    remote = side.transport.open(descriptor, WAIT_S)
    sent = Memory.of(random_bytes(100))
    remote.submit_write(sent, [0], [0], 100, 1).wait(WAIT_S)
    assert side.peer("digest", key, first=0, end=100) == digest(sent.view())
    remote.close()


def raw_connection(descriptor):
    is_tcp = descriptor.address.startswith("tcp:")
    if not is_tcp:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(descriptor.address)
        return sock
    _, host, port = descriptor.address.split(":")
    return socket.create_connection((host, int(port)))


def test_descriptors_survive_the_wire_and_hold_no_secret(side):
    _, descriptor = side.peer.offer()
    encoded = msgspec.msgpack.encode(descriptor)
    assert msgspec.msgpack.decode(encoded, type=RegionDescriptor) == descriptor
    assert side.options.secret not in encoded
    assert side.options.secret.hex() not in repr(side.options)


def test_another_transports_descriptor_is_refused(side):
    _, descriptor = side.peer.offer()
    with pytest.raises(RefusedError):
        side.transport.open(msgspec.structs.replace(descriptor, transport="other"), WAIT_S)


@pytest.mark.parametrize("kind", ["drop", "duplicate", "delay", "corrupt", "stall", "kill"])
def test_the_faulty_transport_fails_as_transports_do(kind, tmp_path):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    peer = harness.Peer("shm", options)
    wrong = faults.Faults(kind, at=[1], delay_s=0.001, pid=peer.process.pid)
    transport = faults.FaultyTransport(create("shm", options), wrong)
    key, descriptor = peer.offer()
    remote = transport.open(descriptor, WAIT_S)
    local = Memory.of(random_bytes(100))
    remote.submit_write(local, [0], [0], 100, 1).wait(WAIT_S)
    if kind in ("duplicate", "delay"):
        remote.submit_write(local, [0], [100], 100, 1).wait(WAIT_S)
        assert peer("digest", key, first=100, end=200) == digest(local.view())
    else:
        expected = TransferTimeoutError if kind == "stall" else PeerGoneError
        with pytest.raises(expected):
            write_for_ever(remote, local, 0.01 if kind == "stall" else WAIT_S)
    transport.close()
    peer.end()


def write_for_ever(remote, local, wait_s):
    while True:
        remote.submit_write(local, [0], [100], 100, 1).wait(wait_s)
