"""What every transport promises, between two real processes."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferCancelledError,
    TransferTimeoutError,
    TransportError,
)
from banaserve.transport.interface import RegionDescriptor
from banaserve.transport.memory import PAGE_BYTES, SLICE_BYTES, Memory
from banaserve.transport.options import TransportOptions
from banaserve.transport.registry import create

WAIT_S = 20.0
REGION_BYTES = 3 * 2**20 + 123
NAMES = ["shm", "tcp", "torch_distributed", "nixl"]
PACKAGES = {"torch_distributed": "torch", "nixl": "nixl"}


class Peer:
    """A process that offers regions."""

    def __init__(self, name, options):
        script = Path(__file__).with_name("transport_peer.py")
        arguments = ["offer", name, options.folder, options.secret.hex()]
        self.process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        while self.process.stdout.readline() != "ready\n":
            assert self.process.poll() is None

    def __call__(self, do, region="", **given):
        self.process.stdin.write(json.dumps({"do": do, "region": region, **given}) + "\n")
        self.process.stdin.flush()
        while not (line := self.process.stdout.readline()).startswith("answer: "):
            assert line, "the peer has died"
        return json.loads(line.removeprefix("answer: "))

    def offer(self, num_bytes=REGION_BYTES, epoch=1):
        key, descriptor = self("offer", num_bytes=num_bytes, epoch=epoch)
        return key, msgspec.msgpack.decode(bytes.fromhex(descriptor), type=RegionDescriptor)

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Side:
    """This process's transport, and the peer shared by the tests that leave it whole."""

    def __init__(self, name, folder):
        self.name = name
        self.options = TransportOptions(folder=str(folder), secret=secrets.token_bytes(32))
        self.transport = create(name, self.options)
        self.peer = Peer(name, self.options)

    def open_new(self, **given):
        key, descriptor = self.peer.offer(**given)
        return key, self.transport.open(descriptor, WAIT_S)


@pytest.fixture(scope="module", params=NAMES)
def side(request, tmp_path_factory):
    package = PACKAGES.get(request.param)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    side = Side(request.param, tmp_path_factory.mktemp("t"))
    yield side
    side.transport.close()
    side.peer.end()


@pytest.fixture
def doomed(side):
    """A peer of one test's own, to be killed or stopped."""
    peer = Peer(side.name, side.options)
    yield peer
    peer.end()


def random_bytes(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def digest(array):
    return hashlib.sha256(array).hexdigest()


@pytest.mark.parametrize("num_bytes", [1, PAGE_BYTES, 10 * 2**20, 2 * SLICE_BYTES + 1])
def test_one_run_of_any_size_arrives_and_comes_back(side, num_bytes):
    key, remote = side.open_new(num_bytes=num_bytes)
    sent, back = random_bytes(num_bytes), np.zeros(num_bytes, np.uint8)
    remote.warm(0, num_bytes)
    remote.submit_write(Memory.of(sent), [0], [0], num_bytes, 1).wait(WAIT_S)
    assert side.peer("digest", key, first=0, end=num_bytes) == digest(sent)
    remote.submit_read(Memory.of(back), [0], [0], num_bytes, 1).wait(WAIT_S)
    assert np.array_equal(sent, back)
    remote.close()


@pytest.mark.parametrize(("offsets", "num_bytes"), [([], 8), ([0, 5], 0), ([REGION_BYTES], 0)])
def test_nothing_to_copy_is_a_transfer_too(side, offsets, num_bytes):
    _, remote = side.open_new()
    local = Memory.of(np.zeros(REGION_BYTES, np.uint8))
    ticket = remote.submit_write(local, offsets, offsets, num_bytes, 1)
    ticket.wait(WAIT_S)
    assert ticket.poll()
    with pytest.raises(StaleEpochError):
        remote.submit_write(local, offsets, offsets, num_bytes, 2).wait(WAIT_S)
    remote.close()


RUNS = st.integers(0, 5000).flatmap(
    lambda n: st.tuples(
        st.just(n), st.lists(st.integers(0, REGION_BYTES // 5000 - 1), max_size=20, unique=True)
    )
)


def test_random_plans_leave_what_a_model_of_the_region_holds(side):
    key, remote = side.open_new()
    model = np.zeros(REGION_BYTES, np.uint8)
    local = random_bytes(REGION_BYTES)

    @settings(max_examples=25)
    @given(runs=RUNS, shift=st.integers(0, 100), writes=st.booleans(), seed=st.integers(0, 99))
    def run(runs, shift, writes, seed):
        num_bytes, places = runs
        remote_offsets = np.array(places, np.int64) * 5000
        local_offsets = np.random.default_rng(seed).permutation(remote_offsets) + shift
        submit = remote.submit_write if writes else remote.submit_read
        submit(Memory.of(local), local_offsets, remote_offsets, num_bytes, 1).wait(WAIT_S)
        for ours, theirs in zip(local_offsets, remote_offsets, strict=True):
            if writes:
                model[theirs : theirs + num_bytes] = local[ours : ours + num_bytes]
            else:
                assert np.array_equal(
                    model[theirs : theirs + num_bytes], local[ours : ours + num_bytes]
                )
        assert side.peer("digest", key, first=0, end=REGION_BYTES) == digest(model)

    run()
    remote.close()


@pytest.mark.parametrize(
    ("local_offsets", "remote_offsets", "num_bytes"),
    [
        ([0], [REGION_BYTES - 7], 8),
        ([0], [-1], 8),
        ([0], [2**63 - 1], 8),
        ([2**64 - 1], [0], 8),
        ([REGION_BYTES - 7], [0], 8),
        ([-1], [0], 8),
        ([0, 8], [0], 8),
        ([0.5], [0], 8),
        ([[0]], [[0]], 8),
        ([0], [0], -1),
        ([0], [0], REGION_BYTES + 1),
        ([0], [0], 2**63),
    ],
)
def test_what_leaves_the_region_or_the_local_memory_is_refused(
    side, local_offsets, remote_offsets, num_bytes
):
    key, remote = side.open_new()
    local = Memory.of(np.full(REGION_BYTES, 7, np.uint8))
    for submit in (remote.submit_write, remote.submit_read):
        with pytest.raises(RefusedError):
            submit(local, local_offsets, remote_offsets, num_bytes, 1)
    nothing = digest(np.zeros(REGION_BYTES, np.uint8))
    assert side.peer("digest", key, first=0, end=REGION_BYTES) == nothing
    remote.close()


def test_a_read_into_read_only_memory_is_refused(side):
    _, remote = side.open_new()
    local = np.zeros(8, np.uint8)
    local.flags.writeable = False
    with pytest.raises(RefusedError):
        remote.submit_read(Memory.of(local), [0], [0], 8, 1)
    remote.submit_write(Memory.of(local), [0], [0], 8, 1).wait(WAIT_S)
    remote.close()


def test_the_offering_side_checks_bounds_itself(side):
    _, true = side.peer.offer()
    lie = msgspec.structs.replace(true, num_bytes=true.num_bytes + PAGE_BYTES)
    local = Memory.of(np.zeros(PAGE_BYTES, np.uint8))

    def copy():
        remote = side.transport.open(lie, WAIT_S)
        remote.submit_write(local, [0], [true.num_bytes], PAGE_BYTES, 1).wait(WAIT_S)

    with pytest.raises(RefusedError):
        copy()


def test_only_the_present_epoch_is_accepted(side):
    key, remote = side.open_new(epoch=3)
    local = Memory.of(random_bytes(100))
    remote.submit_write(local, [0], [0], 100, 3).wait(WAIT_S)
    for epoch in (2, 4):
        with pytest.raises(StaleEpochError):
            remote.submit_write(local, [0], [50], 50, epoch).wait(WAIT_S)
    assert side.peer("advance", key, epoch=2) == "RefusedError"
    assert side.peer("advance", key, epoch=4) == "done"
    with pytest.raises(StaleEpochError):
        remote.submit_read(local, [0], [0], 100, 3).wait(WAIT_S)
    assert side.peer("digest", key, first=0, end=100) == digest(random_bytes(100))
    remote.submit_write(local, [0], [0], 100, 4).wait(WAIT_S)
    remote.close()


def test_released_pages_read_as_zero_and_can_be_written_again(side):
    key, remote = side.open_new(num_bytes=8 * PAGE_BYTES)
    side.peer("fill", key, value=9)
    freed = side.peer("release", key, first=PAGE_BYTES - 1, num_bytes=2 * PAGE_BYTES + 1)
    assert freed == 2 * PAGE_BYTES
    seen = np.zeros(8 * PAGE_BYTES, np.uint8)
    remote.submit_read(Memory.of(seen), [0], [0], seen.size, 1).wait(WAIT_S)
    assert not seen[PAGE_BYTES : 3 * PAGE_BYTES].any()
    assert (seen[:PAGE_BYTES] == 9).all()
    assert (seen[3 * PAGE_BYTES :] == 9).all()
    sent = Memory.of(random_bytes(PAGE_BYTES))
    remote.submit_write(sent, [0], [PAGE_BYTES], PAGE_BYTES, 1).wait(WAIT_S)
    assert side.peer("digest", key, first=PAGE_BYTES, end=2 * PAGE_BYTES) == digest(sent.view())
    assert side.peer("release", key, first=0, num_bytes=9 * PAGE_BYTES) == "RefusedError"
    remote.close()


def test_a_region_that_is_closed_refuses_and_can_be_offered_again(side):
    key, old = side.peer.offer()
    remote = side.transport.open(old, WAIT_S)
    local = Memory.of(random_bytes(64))
    side.peer("close", key)
    with pytest.raises(TransportError):
        remote.submit_write(local, [0], [0], 64, 1).wait(WAIT_S)
    with pytest.raises(RefusedError):
        side.transport.open(old, WAIT_S)
    again_key, again = side.open_new()
    again.submit_write(local, [0], [0], 64, 1).wait(WAIT_S)
    assert side.peer("digest", again_key, first=0, end=64) == digest(local.view())
    assert again_key != key
    remote.close()
    again.close()


def test_two_threads_submit_at_once(side):
    key, remote = side.open_new(num_bytes=200 * 10_000)
    sent = random_bytes(200 * 10_000)
    failures = []

    def half(first):
        try:
            tickets = [
                remote.submit_write(Memory.of(sent), [i * 10_000], [i * 10_000], 10_000, 1)
                for i in range(first, 200, 2)
            ]
            for ticket in tickets:
                ticket.wait(WAIT_S)
        except TransportError as error:
            failures.append(error)

    threads = [threading.Thread(target=half, args=(first,)) for first in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert side.peer("digest", key, first=0, end=sent.size) == digest(sent)
    remote.close()


def test_a_cancelled_transfer_ends_and_those_before_it_arrive(side):
    num_bytes = 16 * SLICE_BYTES
    key, remote = side.open_new(num_bytes=num_bytes)
    sent = Memory.of(np.ones(num_bytes, np.uint8))
    first = remote.submit_write(sent, [0], [0], num_bytes, 1)
    second = remote.submit_write(sent, [0], [0], num_bytes, 1)
    assert second.cancel()
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
    with pytest.raises(PeerGoneError):
        tickets[-1].wait(WAIT_S)
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
    if side.name == "shm":
        ticket.wait(WAIT_S)  # Nobody there has to do anything.
    else:
        with pytest.raises(TransferTimeoutError):
            ticket.wait(0.2)
        assert ticket.cancel()
        with pytest.raises(TransferCancelledError):
            ticket.wait(0.0)
    remote.close()


def test_nobody_with_another_secret_opens_a_region(side, tmp_path):
    if side.name == "shm":
        pytest.skip("the kernel names the peer; there is no secret")
    _, descriptor = side.peer.offer()
    stranger = create(side.name, TransportOptions(folder=str(tmp_path), secret=bytes(32)))
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
