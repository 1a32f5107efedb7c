"""Hostile bytes against a live daemon: that connection ends, everybody else goes on."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import MessageReader
from banaserve.kvstore import wire
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.leases import Lookup
from depth import num_examples
from fingerprints import FINGERPRINT
from store_process import fork_store

KEY = b"k" * 32
TIMEOUT_S = 60.0
MUCH_BYTES = 2**28

fuzzed = settings(
    max_examples=num_examples(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

numbers = st.integers(-1, 2**64 - 1) | st.integers(0, 3)
keys = st.binary(min_size=16, max_size=64)
atoms = st.none() | st.booleans() | numbers | st.floats()
texts = st.text(max_size=8)
wild = st.recursive(
    atoms | texts | st.binary(max_size=70),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=12,
)
tags = st.sampled_from(
    ["hello", "lookup", "exchange", "commit", "abandon", "release", "stats", "clear", "nonsense"]
)
almost_messages = st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(wild, max_size=5))
valid_messages = st.one_of(
    st.builds(wire.LookupKeys, st.integers(0, 9), st.lists(keys, max_size=4)),
    st.builds(
        wire.ExchangeSlots,
        st.integers(0, 9),
        st.lists(keys, max_size=4),
        st.lists(st.tuples(keys, st.none() | keys), max_size=4),
        st.binary(max_size=64),
        st.floats(0, 1e6),
    ),
    st.builds(wire.GetStats, st.integers(0, 9)),
)


class LiveStore:
    """A daemon, and one client that must never notice what others send."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.witness = StoreClient(path, FINGERPRINT, client_name="witness", timeout_s=TIMEOUT_S)
        (slot,) = self.witness.exchange(reserve=[(KEY, None)]).reserved
        assert slot is not None
        assert self.witness.commit([slot])
        self.generation = self.witness.view().generation

    def attack(self, data: bytes, *, greets: bool) -> None:
        """Send bytes and wait until the store has closed the connection."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(str(self.path))
            if greets:
                hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, "attacker", FINGERPRINT)
                sock.sendall(wire.REQUESTS.encode(hello))
            with suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(65536):
                    pass
        self.check()

    def check(self) -> None:
        assert self.witness.lookup([KEY]) in ([Lookup.HIT], [Lookup.MISS])
        assert self.witness.view().generation == self.generation


@pytest.fixture(scope="module")
def store() -> Iterator[LiveStore]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sock"
        options = ("--ssd", f"{folder}/ssd", "--ssd-size", "1MiB", "--tenant-quota", "0.5")
        process = fork_store(path, "256KiB", *options, stderr=subprocess.DEVNULL)
        live = LiveStore(path)
        yield live
        assert process.poll() is None, "the store has crashed"
        live.witness.close()
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def exchange(tenant: bytes, compute_block_s: float) -> bytes:
    return wire.REQUESTS.encode(wire.ExchangeSlots(2, [KEY], [], tenant, compute_block_s))


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@fuzzed
@given(data=st.binary(max_size=300), greets=st.booleans())
def test_random_bytes(store: LiveStore, data: bytes, greets: bool) -> None:
    store.attack(data, greets=greets)


@fuzzed
@given(message=wild | almost_messages, greets=st.booleans())
def test_frames_that_are_almost_messages(store: LiveStore, message: Any, greets: bool) -> None:
    store.attack(frame(msgspec.msgpack.encode(message)), greets=greets)


@fuzzed
@given(
    messages=st.lists(valid_messages, min_size=1, max_size=3),
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), max_size=3),
    cut=st.integers(0, 10**6),
    greets=st.booleans(),
)
def test_damaged_messages(
    store: LiveStore,
    messages: list[wire.Request],
    flips: list[tuple[int, int]],
    cut: int,
    greets: bool,
) -> None:
    data = bytearray(b"".join(wire.REQUESTS.encode(message) for message in messages))
    for position, bits in flips:
        data[position % len(data)] ^= bits
    store.attack(bytes(data[: cut % (len(data) + 1)]), greets=greets)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param((2**32 - 1).to_bytes(4, "little"), id="oversized"),
        pytest.param((wire.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little") + b"x" * 99, id="too-long"),
        pytest.param(frame(b""), id="empty"),
        pytest.param(frame(b"\x91" * 5000), id="deep"),
        pytest.param(frame(b"\xdd\xff\xff\xff\xff"), id="hostile-array-length"),
        pytest.param(frame(b"\xc6\xff\xff\xff\xff"), id="hostile-bytes-length"),
        pytest.param(wire.REQUESTS.encode(wire.GetStats(1)), id="before-hello"),
        pytest.param(wire.REQUESTS.encode(wire.ClientHello(1, 99, "x", None)), id="other-version"),
    ],
)
def test_hostile_frames_end_the_connection(store: LiveStore, data: bytes) -> None:
    before = fetch_stats(store.path, TIMEOUT_S)
    store.attack(data, greets=False)
    after = fetch_stats(store.path, TIMEOUT_S)
    if b"hello" not in data:
        assert after.protocol_errors == before.protocol_errors + 1
    assert after.clients == 1


def test_a_client_that_does_not_read_its_replies_is_stopped(store: LiveStore) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(store.path))
        sock.sendall(
            wire.REQUESTS.encode(wire.ClientHello(1, wire.PROTOCOL_VERSION, "deaf", FINGERPRINT))
        )
        sock.setblocking(False)
        request = wire.REQUESTS.encode(wire.GetStats(2)) * 1000
        num_bytes = 0
        with suppress(BlockingIOError):
            while num_bytes < MUCH_BYTES:
                num_bytes += sock.send(request)
                store.check()
    assert num_bytes < MUCH_BYTES, "the store takes requests without end"
    store.check()


@pytest.mark.parametrize(
    ("tenant", "compute_block_s"),
    [(b"x" * 65, 0.0), (b"", -1.0), (b"", float("nan")), (b"", float("inf")), (b"", 1e9)],
)
def test_hostile_terms_of_an_exchange(
    store: LiveStore, tenant: bytes, compute_block_s: float
) -> None:
    before = fetch_stats(store.path, TIMEOUT_S).protocol_errors
    store.attack(exchange(tenant, compute_block_s), greets=True)
    assert fetch_stats(store.path, TIMEOUT_S).protocol_errors == before + 1


@given(data=st.binary(max_size=64), step=st.integers(1, 7))
@settings(deadline=None, derandomize=True)
def test_the_reader_yields_messages_or_raises(data: bytes, step: int) -> None:
    reader = MessageReader(wire.REQUESTS)
    good = wire.GetStats(7)
    stream = wire.REQUESTS.encode(good) + data
    messages: list[wire.Request] = []
    try:
        for first in range(0, len(stream), step):
            reader.feed(stream[first : first + step])
            messages += iter(reader.take, None)
    except ProtocolError:
        pass
    assert messages[0] == good


def test_a_message_that_no_peer_would_accept_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="too large"):
        wire.REQUESTS.encode(wire.LookupKeys(1, [b"x" * 2**20] * 17))
