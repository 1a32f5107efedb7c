"""What channels accept of what comes over a socket, and what they make of the rest."""

from __future__ import annotations

import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import transport_faults as faults
from banaserve.transport.channels import frames
from banaserve.transport.channels.authentication import Seal
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import over_unix
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.interface import Message, Tensor
from depth import num_examples, seeds

WAIT_S = 60.0
KEYS = (bytes(32), bytes([1]) * 32)


def pair(sealed=False):
    """Two channels within this process, and their streams."""
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    seals = (Seal(*KEYS), Seal(*reversed(KEYS))) if sealed else (None, None)
    return (StreamChannel(ours, seals[0]), StreamChannel(theirs, seals[1])), (ours, theirs)


def faulty_pair(kind, sealed=False, **given):
    """A channel whose frames go wrong, and the channel at the other end."""
    ours, theirs = (SocketStream(sock) for sock in socket.socketpair())
    seals = (Seal(*KEYS), Seal(*reversed(KEYS))) if sealed else (None, None)
    broken = faults.FaultyStream(ours, faults.Faults(kind, **given))
    return StreamChannel(broken, seals[0]), StreamChannel(theirs, seals[1])


def tensor(num_bytes, dtype="uint8", seed=0):
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    return Tensor(dtype, (num_bytes // frames.ITEM_BYTES[dtype],), data)


def test_a_frame_that_comes_twice_is_delivered_once():
    sender, receiver = faulty_pair("duplicate")
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
    monkeypatch.setattr("banaserve.transport.channels.stream.STALL_S", 0.05)
    sender, receiver = faulty_pair("stall")
    sender.send(Message(b"1", (tensor(1000),)), WAIT_S)
    with pytest.raises(PeerGoneError, match="stands still"):
        receiver.receive(0.05)


@pytest.mark.parametrize("seed", seeds(40, 40))
def test_a_damaged_frame_is_never_delivered_where_frames_are_signed(seed, monkeypatch):
    monkeypatch.setattr("banaserve.transport.channels.stream.STALL_S", 0.02)
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
    ours.sendall(struct.pack("<I", header_bytes))
    with pytest.raises(PeerGoneError, match="too large"):
        receiver.receive(WAIT_S)
    ours.close()


@pytest.mark.parametrize("shapes", [[frames.MAX_PAYLOAD_BYTES // 2] * 3, [2**28, 2**28]])
def test_tensors_over_the_limit_are_refused_before_memory_is_taken(shapes):
    described = tuple(("uint8", (num_bytes,)) for num_bytes in shapes)
    header = frames.FrameHeader(1, frames.ONE_WAY, 0, 0, b"", described)
    ours, theirs = socket.socketpair()
    receiver = over_unix(theirs)
    ours.sendall(frames.HEADERS.encode(header))
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


def recorded(*bodies):
    """Frames as one side of a connection sends them, and the keys of that connection."""
    ours, theirs = socket.socketpair()
    sender = StreamChannel(SocketStream(ours), Seal(*KEYS))
    found = []
    for body in bodies:
        sender.send(Message(body, (tensor(1000),)), WAIT_S)
        found.append(theirs.recv(65536))
    sender.close()
    theirs.close()
    return found


def delivered(sent, seal):
    """The bodies that a channel delivers of these bytes, and why it broke."""
    ours, theirs = socket.socketpair()
    receiver = StreamChannel(SocketStream(theirs), seal)
    ours.sendall(b"".join(sent))
    ours.close()
    bodies = []
    while True:
        try:
            bodies.append(receiver.receive(WAIT_S).body)
        except PeerGoneError as error:
            break_reason = str(error)
            break
    with pytest.raises(PeerGoneError):
        receiver.receive(WAIT_S)
    return bodies, break_reason


@pytest.mark.parametrize(
    ("arrange", "num_delivered", "reason"),
    [
        (lambda a, b, c: [a, b, c], 3, "closed"),
        (lambda a, b, c: [a, a, b], 1, "wrong code"),
        (lambda a, b, c: [a, b, a], 2, "wrong code"),
        (lambda a, b, c: [b, a, c], 0, "wrong code"),
        (lambda a, b, c: [a, c], 1, "wrong code"),
        (lambda a, b, c: [a, b[:-1]], 1, "closed"),
        (lambda a, b, c: [a, b[:-16] + c[-16:]], 1, "wrong code"),
        (lambda a, b, c: [a, b[:-16] + bytes(16)], 1, "wrong code"),
    ],
    ids=["as sent", "twice", "again later", "reordered", "left out", "cut", "other code", "zeros"],
)
def test_signed_frames_are_delivered_once_and_in_their_order(arrange, num_delivered, reason):
    bodies, why = delivered(arrange(*recorded(b"1", b"2", b"3")), Seal(*reversed(KEYS)))
    assert bodies == [b"1", b"2", b"3"][:num_delivered]
    assert reason in why


@pytest.mark.parametrize("at", range(0, 1050, 75))
def test_a_flipped_bit_anywhere_in_a_signed_frame_breaks_the_channel(at):
    (frame,) = recorded(b"pay")
    wrong = bytearray(frame)
    wrong[at % len(frame)] ^= 1 << at % 8
    # Lengths that grew wait for bytes that do not come.
    assert delivered([bytes(wrong)], Seal(*reversed(KEYS)))[0] == []


@pytest.mark.parametrize(
    ("sending", "receiving"),
    [(b"x" * 32, b"y" * 32), KEYS],
    ids=["another connection", "reflected"],
)
def test_a_recorded_frame_is_of_no_use_elsewhere(sending, receiving):
    bodies, why = delivered(recorded(b"pay"), Seal(sending, receiving))
    assert (bodies, why) == ([], "a frame has a wrong code")


def test_a_channel_whose_key_is_used_up_says_so_and_ends():
    ours, theirs = socket.socketpair()
    sender = StreamChannel(SocketStream(ours), Seal(*KEYS, max_frames=2))
    receiver = StreamChannel(SocketStream(theirs), Seal(*reversed(KEYS)))
    for body in (b"1", b"2"):
        sender.send(Message(body), WAIT_S)
        assert receiver.receive(WAIT_S).body == body
    for _ in range(2):
        with pytest.raises(PeerGoneError, match="used its key up"):
            sender.send(Message(b"3"), WAIT_S)
    with pytest.raises(PeerGoneError, match="closed"):
        receiver.receive(WAIT_S)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 600_000])
def test_a_reply_is_received_into_given_memory_where_it_has_its_size(sealed, num_bytes):
    (ours, theirs), _ = pair(sealed)
    block = tensor(num_bytes, seed=3)

    def answer():
        for _ in range(2):
            request = theirs.receive(WAIT_S)
            theirs.send(Message(b"by the way", (tensor(num_bytes, seed=4),)), WAIT_S)
            theirs.reply(request, Message(b"answer", (block, tensor(8))), WAIT_S)

    thread = threading.Thread(target=answer)
    thread.start()
    into = np.zeros(num_bytes, np.uint8)
    reply = ours.call(Message(b"question"), WAIT_S, [into])
    assert np.array_equal(into, block.data)
    assert np.shares_memory(reply.tensors[0].data, into) is (num_bytes > 0)
    assert np.array_equal(ours.receive(WAIT_S).tensors[0].data, tensor(num_bytes, seed=4).data)

    other = np.zeros(num_bytes + 1, np.uint8)
    reply = ours.call(Message(b"question"), WAIT_S, [other])
    thread.join()
    assert np.array_equal(reply.tensors[0].data, block.data)
    assert not other.any()


def test_a_closed_channel_wakes_the_peer_at_once():
    (ours, theirs), _ = pair()
    ours.close()
    with pytest.raises(PeerGoneError):
        theirs.receive(WAIT_S)
