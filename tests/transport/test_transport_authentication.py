"""Handshakes and codes of TCP connections: what a peer is told, and what no recording opens."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.transport.backends.tcp import TcpTransport
from banaserve.transport.channels import authentication
from banaserve.transport.channels.authentication import CODE_BYTES, Seal
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import PeerGoneError, RefusedError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.threaded_server import MAX_CONNECTIONS
from depth import num_examples

SECRET, OTHER = b"the secret of a run", b"the secret of another run"
KEYS = (bytes(32), bytes([1]) * 32)
WAIT_S = 60.0


class Recorder:
    """A stream that keeps what is written to it."""

    def __init__(self, sock):
        self._inner = SocketStream(sock)
        self.written = b""

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def write(self, parts, deadline):
        self.written += b"".join(parts)
        self._inner.write(parts, deadline)


def shaken(connecting=SECRET, listening=SECRET):
    """What both halves of a handshake end in, and what each has said."""
    ours, theirs = (Recorder(sock) for sock in socket.socketpair())
    ended = []

    def welcome():
        try:
            ended.append(authentication.welcome(theirs, listening, time.monotonic() + WAIT_S))
        except (RefusedError, PeerGoneError) as error:
            ended.append(error)

    thread = threading.Thread(target=welcome)
    thread.start()
    try:
        found = authentication.greet(ours, connecting, time.monotonic() + WAIT_S)
    except (RefusedError, PeerGoneError) as error:
        found = error
        ours.close()
    thread.join()
    ours.close()
    theirs.close()
    return found, ended[0], ours.written, theirs.written


def told(said, half):
    """How one half of a handshake ends with a peer that says ``said`` and leaves."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
        theirs.shutdown(socket.SHUT_WR)
        stream = SocketStream(ours)
        try:
            with pytest.raises((RefusedError, PeerGoneError)) as ended:
                half(stream, SECRET, time.monotonic() + WAIT_S)
        finally:
            stream.close()
    return str(ended.value)


def accepts(seal, frame, code):
    """Whether a frame that was received whole is the peer's next one."""
    computed = seal.next_received()
    computed.add(frame)
    return seal.accept(computed, code)


def test_both_sides_of_a_handshake_read_each_other():
    ours, theirs, *_ = shaken()
    for one, other in ((ours, theirs), (theirs, ours)):
        for body in (b"", b"first", b"second" * 100_000):
            code = one.sign([b"head", body])
            assert len(code) == CODE_BYTES
            assert accepts(other, b"head" + body, code)


def test_no_two_connections_have_the_same_codes():
    codes = [one.sign([b"the same"]) for _ in range(3) for one in shaken()[:2]]
    assert len(set(codes)) == len(codes)


def test_a_wrong_secret_is_one_line():
    ours, theirs, *_ = shaken(connecting=OTHER)
    assert str(ours) == "the peer does not know this run's secret"
    assert "broken off" in str(theirs)


def test_a_recorded_handshake_opens_nothing():
    _, _, connecting, listening = shaken()
    assert told(connecting, authentication.welcome) == "the peer does not know this run's secret"
    assert told(listening, authentication.greet) == "the peer does not know this run's secret"


@pytest.mark.parametrize(
    ("half", "first", "answer"),
    [
        (authentication.greet, b"", lambda said: 2 * said[-32:]),
        (authentication.welcome, authentication._MAGIC + bytes(32), lambda said: said[-32:]),
    ],
    ids=["its nonce", "its proof"],
)
def test_what_a_side_says_is_no_answer_to_it(half, first, answer):
    ours, theirs = socket.socketpair()

    def reflect():
        theirs.sendall(first)
        theirs.sendall(answer(theirs.recv(4096)))

    thread = threading.Thread(target=reflect)
    thread.start()
    stream = SocketStream(ours)
    with pytest.raises(RefusedError, match="secret"):
        half(stream, SECRET, time.monotonic() + WAIT_S)
    thread.join()
    stream.close()
    theirs.close()


def test_another_version_of_the_protocol_is_named():
    assert "another protocol" in told(b"banaserve-transport-1\n".ljust(100), authentication.welcome)


@pytest.mark.parametrize("sent", [0, 1, 5])
def test_no_key_is_used_for_more_frames_than_it_is_good_for(sent):
    ours, theirs = Seal(*KEYS, max_frames=sent), Seal(*reversed(KEYS), max_frames=sent)
    for _ in range(sent):
        assert accepts(theirs, b"x", ours.sign([b"x"]))
    with pytest.raises(PeerGoneError, match="connect again"):
        ours.sign([b"x"])
    with pytest.raises(PeerGoneError, match="connect again"):
        theirs.next_received()


def test_the_same_frame_never_has_the_same_code():
    ours = Seal(*KEYS)
    assert len({ours.sign([b"the same"]) for _ in range(1000)}) == 1000


def test_after_a_wrong_code_nothing_is_accepted():
    ours, theirs = Seal(*KEYS), Seal(*reversed(KEYS))
    codes = [ours.sign([b"x"]) for _ in range(3)]
    assert accepts(theirs, b"x", codes[0])
    assert not accepts(theirs, b"y", codes[1])
    assert not accepts(theirs, b"x", codes[2])


@settings(max_examples=num_examples(60))
@given(
    parts=st.lists(st.binary(max_size=600), max_size=6),
    cuts=st.lists(st.integers(0, 3000), max_size=6),
    bit=st.integers(0, 2**20),
)
def test_a_code_is_of_the_bytes_however_they_are_cut(parts, cuts, bit):
    data = b"".join(parts)
    ours, same, other = Seal(*KEYS), Seal(*reversed(KEYS)), Seal(*reversed(KEYS))
    code = ours.sign(parts)
    at = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    checked = same.next_received()
    for first, end in itertools.pairwise(at):
        checked.add(data[first:end])
    assert same.accept(checked, code)
    changed = bytearray(data + code)
    changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    assert not accepts(other, bytes(changed[: len(data)]), bytes(changed[len(data) :]))


def test_strangers_keep_no_peer_away_from_a_region():
    options = TransportOptions(folder="", secret=SECRET)
    offering, opening = TcpTransport(options), TcpTransport(options)
    place = offering.offer(4096, 1).descriptor
    host, _, port = place.address.removeprefix("tcp:").rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(MAX_CONNECTIONS)]
    opening.open(place, WAIT_S).close()
    for one in (opening, offering, *strangers):
        one.close()
