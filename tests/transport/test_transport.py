"""The transport floor's parts that need no second process."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from banaserve.base.errors import UserError
from banaserve.transport import registry, threaded_server
from banaserve.transport.backends.channel_served import Begin, End, Open, ask, grant_in, message_of
from banaserve.transport.channels import authentication
from banaserve.transport.channels.connect import connect
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferTimeoutError,
)
from banaserve.transport.interface import Tensor, TransportOptions
from banaserve.transport.memory import PAGE_BYTES, SLICE_BYTES, Memory, Plan, whole_pages
from banaserve.transport.regions.descriptor import MAX_REGION_BYTES
from banaserve.transport.regions.shared_file import SharedFile, new_file
from waiting import eventually

OPTIONS = TransportOptions(folder="unused", secret=bytes(16))
NONE = np.empty(0, np.int64)


def test_an_unknown_transport_is_answered_with_the_known_ones():
    with pytest.raises(UserError, match="nixl, shm, tcp, torch_distributed"):
        registry.create("smh", OPTIONS)


def test_whatever_goes_wrong_while_groups_meet_ends_the_meeting():
    meet = pytest.importorskip("banaserve.transport.backends.torch_distributed")._meet
    looks = itertools.count()

    def check_peer():
        assert next(looks) < 100, "it goes on for ever"

    def make():
        raise TypeError("a port is a number")

    with pytest.raises(PeerGoneError, match="a port is a number"):
        meet(make, check_peer)


def test_a_short_secret_is_refused_and_no_secret_is_printed():
    with pytest.raises(ValueError, match="16 bytes"):
        TransportOptions(folder="unused", secret=b"short")
    assert "secret" not in repr(OPTIONS)


def test_the_floor_imports_torch_nowhere_but_in_its_transport():
    code = (
        "import sys, banaserve.transport.registry, banaserve.transport.backends.shm, "
        "banaserve.transport.backends.tcp, banaserve.transport.channels.connect; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'nixl', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_region_for_which_there_are_no_addresses_is_refused_and_leaves_no_descriptor(tmp_path):
    transport = registry.create("shm", TransportOptions(folder=str(tmp_path), secret=bytes(16)))
    transport.offer(PAGE_BYTES, 1).close()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RefusedError, match="cannot map"):
        transport.offer(MAX_REGION_BYTES, 1)
    assert len(os.listdir("/proc/self/fd")) == num_open
    transport.close()


@pytest.mark.parametrize(
    ("run_bytes", "num_runs"),
    [(1, 10), (SLICE_BYTES, 3), (SLICE_BYTES + 1, 2), (2 * SLICE_BYTES, 1), (100_000, 100)],
)
def test_slices_cover_a_plan_exactly_once(run_bytes, num_runs):
    offsets = np.arange(num_runs, dtype=np.int64) * run_bytes
    plan = Plan(Memory(1, 2**40), offsets, offsets + 7, run_bytes, 0, True)
    pieces = []
    for part in plan.slices():
        assert part.num_bytes * part.local_offsets.size <= SLICE_BYTES
        assert np.array_equal(part.local_offsets + 7, part.remote_offsets)
        pieces += [(int(at), int(at) + part.num_bytes) for at in part.local_offsets]
    pieces.sort()
    assert pieces[0][0] == 0
    assert pieces[-1][1] == num_runs * run_bytes
    assert all(end == first for (_, end), (first, _) in itertools.pairwise(pieces))


@pytest.mark.parametrize(
    ("first", "num_bytes", "pages"),
    [(0, PAGE_BYTES, (0, 1)), (1, PAGE_BYTES, (1, 0)), (1, 3 * PAGE_BYTES, (1, 2)), (0, 0, (0, 0))],
)
def test_only_whole_pages_are_given_back(first, num_bytes, pages):
    assert whole_pages(first, num_bytes) == (pages[0] * PAGE_BYTES, pages[1] * PAGE_BYTES)


def test_memory_of_an_array_is_its_bytes():
    array = np.arange(10, dtype=np.int32)
    assert np.array_equal(Memory.of(array).view(), array.view(np.uint8))
    with pytest.raises(ValueError, match="contiguous"):
        Memory.of(array[::2])


def test_an_epoch_cannot_move_on_while_a_peer_copies_and_the_peer_stops_afterwards():
    owner = SharedFile(new_file(PAGE_BYTES, 1), PAGE_BYTES)
    peer = SharedFile(owner.reopen(), PAGE_BYTES)
    with peer.use(1), pytest.raises(TransferTimeoutError):
        owner.advance(2, 0.002)
    with pytest.raises(StaleEpochError), peer.use(1):
        pass
    with peer.use(2):
        pass
    owner.advance(3, 1.0)
    owner.retire(1.0)
    with pytest.raises(RefusedError, match="closed"), peer.use(3):
        pass
    owner.close()
    peer.close()


def test_released_pages_really_go_back_to_the_system():
    owner = SharedFile(new_file(64 * PAGE_BYTES, 1), 64 * PAGE_BYTES)
    owner.memory.view()[:] = 1
    before = os.fstat(owner._fd).st_blocks * 512
    assert owner.release(0, 64 * PAGE_BYTES) == 64 * PAGE_BYTES
    assert before - os.fstat(owner._fd).st_blocks * 512 == 64 * PAGE_BYTES
    owner.close()


def test_a_file_that_could_shrink_is_refused():
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 2 * PAGE_BYTES)
    with pytest.raises(RefusedError, match="sealed"):
        SharedFile(fd, PAGE_BYTES)
    os.close(fd)


OFFSETS = Tensor("int64", (1,), np.zeros(8, np.uint8))
BYTES = Tensor("uint8", (8,), np.ones(8, np.uint8))
MANY = Tensor("int64", (SLICE_BYTES + 1,), np.zeros(8 * (SLICE_BYTES + 1), np.uint8))
TOO_MANY = Tensor("int64", (2 * SLICE_BYTES,), np.zeros(16 * SLICE_BYTES, np.uint8))


@pytest.mark.parametrize(
    ("said", "tensors", "ends"),
    [
        (Begin(1, 8, True), (OFFSETS, BYTES), None),
        (Begin(1, SLICE_BYTES + 1, False), (OFFSETS,), RefusedError),
        (Begin(1, 1, False), (MANY,), RefusedError),
        (Begin(1, -8, False), (OFFSETS,), RefusedError),
        (Begin(1, 2**62, False), (OFFSETS,), RefusedError),
        (Begin(1, PAGE_BYTES + 1, False), (OFFSETS,), RefusedError),
        (Begin(2, 8, False), (OFFSETS,), StaleEpochError),
        (Begin(1, 8, False), (BYTES,), RefusedError),
        (Begin(1, 4, True), (OFFSETS, BYTES), PeerGoneError),
        (Begin(1, 8, True), (OFFSETS,), PeerGoneError),
        (Begin(1, 8, False), (), PeerGoneError),
        (Begin(1, 0, False), (TOO_MANY,), PeerGoneError),
        (End(), (), PeerGoneError),
        (Open(bytes(16)), (), PeerGoneError),
    ],
)
def test_a_slice_that_a_region_does_not_hold_is_refused(tmp_path, said, tensors, ends):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    owner = registry.create("tcp", options)
    offered = owner.offer(PAGE_BYTES, 1)
    channel = connect(offered.descriptor.address, options, 20.0)
    ask(channel, Open(offered.descriptor.region_id))
    with nullcontext() if ends is None else pytest.raises(ends):
        channel.send(message_of(said, *tensors), 20.0)
        grant_in(channel.receive(20.0))
    changed = np.flatnonzero(offered.memory.view()).tolist()
    assert changed == ([] if ends is not None else list(range(8)))
    channel.close()
    owner.close()


def flipped(parts, number):
    changed = bytearray(parts[number])
    changed[len(changed) // 2] ^= 1
    return [*parts[:number], bytes(changed), *parts[number + 1 :]]


def test_what_was_changed_on_its_way_reaches_no_region(tmp_path):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    owner, peer = (registry.create("tcp", options) for _ in range(2))
    offered = owner.offer(SLICE_BYTES, 1)
    opened, offsets = peer.open(offered.descriptor, 20.0), np.zeros(1, np.int64)
    written = np.full(SLICE_BYTES, 7, np.uint8)
    opened.submit_write(Memory.of(written), offsets, offsets, 4096, 1).wait(60.0)
    write = opened._channel._stream.write
    opened._channel._stream.write = lambda parts, deadline: write(flipped(parts, 2), deadline)
    with pytest.raises(PeerGoneError):
        opened.submit_write(Memory.of(written), offsets, offsets + 4096, 4096, 1).wait(60.0)
    assert np.flatnonzero(offered.memory.view()).size == 4096
    peer.close()
    owner.close()


def test_no_copy_takes_the_answers_of_one_that_broke_off(tmp_path, monkeypatch):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    owner, peer = (registry.create("tcp", options) for _ in range(2))
    opened = peer.open(owner.offer(2 * SLICE_BYTES, 1).descriptor, 20.0)
    local, offsets = Memory.of(np.zeros(2 * SLICE_BYTES, np.uint8)), np.arange(0, SLICE_BYTES, 4096)

    def fail(part):
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(opened, "_take_answer", fail)
        with pytest.raises(PeerGoneError):
            opened.submit_read(local, offsets, offsets, 4096, 1).wait(60.0)
    with pytest.raises(PeerGoneError, match="open the region again"):
        opened.submit_read(local, offsets, offsets, 4096, 1).wait(60.0)
    peer.close()
    owner.close()


@pytest.mark.parametrize("run_bytes", [64, 4096])
def test_reads_of_many_small_runs_end_where_the_kernel_buffers_little(tmp_path, run_bytes):
    options = TransportOptions(folder=str(tmp_path), secret=bytes(16))
    owner, peer = (registry.create("tcp", options) for _ in range(2))
    offered = owner.offer(4 * SLICE_BYTES, 1)
    offered.memory.view()[:] = np.arange(4 * SLICE_BYTES, dtype=np.int64) % 251
    opened = peer.open(offered.descriptor, 20.0)
    for sock in (opened._channel._stream._sock, *owner._service._places._taken):
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, buffer, 32 * 1024)
    local = np.zeros(4 * SLICE_BYTES, np.uint8)
    offsets = np.arange(0, local.size, run_bytes)
    opened.submit_read(Memory.of(local), offsets, offsets, run_bytes, 1).wait(60.0)
    assert np.array_equal(local, offered.memory.view())
    peer.close()
    owner.close()


def test_a_stranger_that_sends_a_byte_at_a_time_is_not_listened_to_past_the_deadline():
    ours, theirs = socket.socketpair()
    done = threading.Event()

    def dribble():
        while not done.wait(0.02):
            theirs.send(b"x")

    sender = threading.Thread(target=dribble)
    sender.start()
    stream = SocketStream(ours)
    with pytest.raises(TransferTimeoutError):
        authentication.welcome(stream, OPTIONS.secret, time.monotonic() + 0.1)
    done.set()
    sender.join()
    stream.close()
    theirs.close()


def test_a_listener_without_file_descriptors_left_is_not_asked_again_at_once():
    class Exhausted:
        def __init__(self):
            self.asked_s = []

        def accept(self):
            self.asked_s.append(time.monotonic())
            raise OSError(errno.EMFILE, "too many open files")

        def shutdown(self, how):
            pass

        def close(self):
            pass

    listener = Exhausted()
    served = threaded_server.Service("exhausted", listener, lambda sock: None)
    eventually(lambda: len(listener.asked_s) >= 3)
    served.close()
    assert all(later - earlier > 0.01 for earlier, later in itertools.pairwise(listener.asked_s))


def test_a_connection_for_which_there_is_no_thread_is_closed_and_the_next_is_served(monkeypatch):
    served = threaded_server.Service(
        "short", listener := threaded_server.listen_tcp("127.0.0.1"), lambda sock: sock.send(b"y")
    )

    def no_thread(thread):
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    for answer in (b"", b"y"):
        with socket.create_connection(listener.getsockname(), 20.0) as sock:
            assert sock.recv(1) == answer
    served.close()


@pytest.mark.parametrize("name", ["tcp", "torch_distributed"])
def test_the_memory_of_a_closed_region_is_given_back_while_a_peer_is_connected(name, tmp_path):
    options = TransportOptions(folder=str(tmp_path), secret=b"s" * 32)
    ours, theirs = registry.create(name, options), registry.create(name, options)
    region = ours.offer(PAGE_BYTES, 1)
    remote = theirs.open(region.descriptor, 20.0)
    sent = Memory.of(np.ones(PAGE_BYTES, np.uint8))
    remote.submit_write(sent, [0], [0], PAGE_BYTES, 1).wait(60.0)
    memory = weakref.ref(region.memory.owner)
    region.close()
    eventually(lambda: memory() is None)
    theirs.close()
    ours.close()
