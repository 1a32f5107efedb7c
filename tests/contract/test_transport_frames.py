"""What channels accept of what comes over a socket, and what they make of the rest."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transport_faults as faults
from banaserve.transport import frames
from banaserve.transport.channel import StreamChannel
from banaserve.transport.connect import over_unix
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.interface import Message, Tensor
from banaserve.transport.seal import Seal
from banaserve.transport.stream import SocketStream
from depth import num_examples

WAIT_S = 20.0


def pair(sealed=False):
    """Two channels within this process, and their streams."""
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    keys = (bytes(32), bytes([1]) * 32)
    seals = (Seal(*keys), Seal(*reversed(keys))) if sealed else (None, None)
    return (StreamChannel(ours, seals[0]), StreamChannel(theirs, seals[1])), (ours, theirs)


def faulty_pair(kind, sealed=False, **given):
    """A channel whose frames go wrong, and the channel at the other end."""
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    keys = (bytes(32), bytes([1]) * 32)
    seals = (Seal(*keys), Seal(*reversed(keys))) if sealed else (None, None)
    broken = faults.FaultyStream(ours, faults.Faults(kind, **given))
    return StreamChannel(broken, seals[0]), StreamChannel(theirs, seals[1])


def tensor(num_bytes, dtype="uint8", seed=0):
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return Tensor(dtype, (num_bytes // frames.ITEM_BYTES[dtype],), data)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_frame_that_comes_twice_is_delivered_once(sealed):
    sender, receiver = faulty_pair("duplicate", sealed)
    for body in (b"1", b"2", b"3"):
        sender.send(Message(body), WAIT_S)
    assert [receiver.receive(WAIT_S).body for _ in range(3)] == [b"1", b"2", b"3"]
    with pytest.raises(TransferTimeoutError):
        receiver.receive(0.0)
    assert receiver.num_refused == 3


def test_a_frame_that_is_missing_breaks_the_channel():
    sender, receiver = faulty_pair("drop", at=[1])
    for body in (b"1", b"2", b"3"):
        sender.send(Message(body), WAIT_S)
    assert receiver.receive(WAIT_S).body == b"1"
    with pytest.raises(PeerGoneError, match="message 2 is missing"):
        receiver.receive(WAIT_S)


def test_a_frame_that_is_late_is_waited_for():
    sender, receiver = faulty_pair("delay", delay_s=0.01)
    sender.send(Message(b"1"), WAIT_S)
    assert receiver.receive(WAIT_S).body == b"1"


def test_half_a_frame_breaks_the_channel_when_nothing_follows(monkeypatch):
    monkeypatch.setattr("banaserve.transport.stream.STALL_S", 0.05)
    sender, receiver = faulty_pair("stall")
    sender.send(Message(b"1", (tensor(1000),)), WAIT_S)
    with pytest.raises(PeerGoneError, match="stands still"):
        receiver.receive(0.05)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_frame_is_never_delivered_where_frames_are_signed(seed, monkeypatch):
    monkeypatch.setattr("banaserve.transport.stream.STALL_S", 0.02)
    sender, receiver = faulty_pair("corrupt", sealed=True, seed=seed)
    sender.send(Message(b"body", (tensor(50),)), WAIT_S)
    with pytest.raises(TransportError):
        receiver.receive(0.02)


@given(data=st.binary(min_size=1, max_size=200))
@settings(max_examples=num_examples(60))
def test_bytes_that_are_no_frame_end_in_one_error(data):
    ours, theirs = socket.socketpair()
    receiver = over_unix(theirs)
    with ours:
        ours.sendall(data)
    with pytest.raises(PeerGoneError):
        receiver.receive(WAIT_S)
    receiver.close()


@pytest.mark.parametrize("header_bytes", [frames.MAX_HEADER_BYTES + 1, 2**32 - 1])
def test_a_length_over_the_limit_is_refused_before_anything_is_read(header_bytes):
    ours, theirs = socket.socketpair()
    receiver = over_unix(theirs)
    ours.sendall(frames.PREFIX.pack(header_bytes, 0))
    with pytest.raises(PeerGoneError, match="too large"):
        receiver.receive(WAIT_S)
    ours.close()


def test_a_one_way_message_that_comes_before_the_reply_is_kept():
    (ours, theirs), _ = pair()

    def answer():
        request = theirs.receive(WAIT_S)
        theirs.send(Message(b"by the way"), WAIT_S)
        theirs.reply(request, Message(b"answer"), WAIT_S)

    thread = threading.Thread(target=answer)
    thread.start()
    assert ours.call(Message(b"question"), WAIT_S).body == b"answer"
    thread.join()
    assert ours.has_pending()
    by_the_way = ours.receive(WAIT_S)
    assert by_the_way.body == b"by the way"
    with pytest.raises(RefusedError):
        ours.reply(by_the_way, Message(b""), WAIT_S)


def test_a_frame_recorded_on_one_connection_is_of_no_use_on_another():
    (sender, _), _ = pair(sealed=True)
    frame = b"".join(frames.encode(Message(b"pay"), 1, frames.ONE_WAY, 0))
    code = Seal(bytes(32), bytes(32)).sign([frame])
    ours, theirs = socket.socketpair()
    receiver = StreamChannel(SocketStream(theirs), Seal(b"x" * 32, b"other".ljust(32)))
    ours.sendall(frame + code)
    with pytest.raises(PeerGoneError, match="wrong code"):
        receiver.receive(WAIT_S)
    ours.close()
    sender.close()


def test_a_closed_channel_wakes_the_peer_at_once():
    (ours, theirs), _ = pair()
    ours.close()
    with pytest.raises(PeerGoneError):
        theirs.receive(WAIT_S)
