"""The disk queue: both engines do the same, with real files."""

from __future__ import annotations

import errno
import os
import random
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from banaserve._native import DiskQueue
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from depth import chosen_seed

PAGE = 4096
DEPTH = 4
DEADLINE_S = 20.0


def refuses_io_uring() -> bool:
    try:
        DiskQueue(1, "io_uring")
    except OSError:
        return True
    return False


needs_io_uring = pytest.mark.skipif(refuses_io_uring(), reason="io_uring is forbidden here")
ENGINES = [pytest.param("io_uring", marks=needs_io_uring), "threads"]


@pytest.fixture(params=ENGINES)
def queue(request: pytest.FixtureRequest) -> Iterator[DiskQueue]:
    queue = DiskQueue(DEPTH, request.param)
    assert queue.engine == request.param
    yield queue
    queue.close()


@pytest.fixture(params=["direct", "buffered"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    direct = os.O_DIRECT if request.param == "direct" else 0
    try:
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | direct)
    except OSError:
        pytest.skip("this file system refuses O_DIRECT")
    yield fd
    os.close(fd)


def parts(*blocks: BlockBytes) -> list[tuple[int, int]]:
    return [(block.ctypes.data, block.nbytes) for block in blocks]


def filled(num_pages: int, seed: int) -> BlockBytes:
    block = aligned_bytes(num_pages * PAGE)
    block[:] = np.frombuffer(random.Random(seed).randbytes(num_pages * PAGE), np.uint8)
    return block


def wait(queue: DiskQueue, count: int) -> dict[int, int]:
    ended: dict[int, int] = {}
    while len(ended) < count:
        assert select.select([queue.fd], [], [], DEADLINE_S)[0], "nothing ends"
        for tag, result in queue.poll():
            assert tag not in ended
            ended[tag] = result
    return ended


def test_a_vectored_write_is_read_back(queue: DiskQueue, fd: int) -> None:
    header, payload = filled(1, 1), filled(7, 2)
    assert queue.submit_write(2**64 - 1, fd, 2 * PAGE, parts(header, payload))
    assert wait(queue, 1) == {2**64 - 1: 8 * PAGE}
    first, rest = aligned_bytes(3 * PAGE), aligned_bytes(5 * PAGE)
    assert queue.submit_read(0, fd, 2 * PAGE, parts(first, rest))
    assert wait(queue, 1) == {0: 8 * PAGE}
    assert bytes(first) + bytes(rest) == bytes(header) + bytes(payload)


def test_large_transfers(queue: DiskQueue, fd: int) -> None:
    block = filled(2048, 3)
    queue.submit_write(1, fd, 0, parts(block[: 1000 * PAGE], block[1000 * PAGE :]))
    assert wait(queue, 1) == {1: block.nbytes}
    target = aligned_bytes(block.nbytes)
    queue.submit_read(2, fd, 0, parts(target))
    assert wait(queue, 1) == {2: block.nbytes}
    assert (target == block).all()


def test_reads_end_with_the_file(queue: DiskQueue, fd: int) -> None:
    os.ftruncate(fd, 3 * PAGE)
    target = aligned_bytes(4 * PAGE)
    for offset, expected in ((0, 3), (PAGE, 2), (3 * PAGE, 0), (9 * PAGE, 0)):
        queue.submit_read(offset, fd, offset, parts(target[:PAGE], target[PAGE:]))
        assert wait(queue, 1) == {offset: expected * PAGE}


def test_depth_is_the_limit(queue: DiskQueue, fd: int) -> None:
    block = filled(1, 5)
    for tag in range(DEPTH):
        assert queue.submit_write(tag, fd, tag * PAGE, parts(block))
    # Ended or not: what was not polled counts.
    assert not queue.submit_write(DEPTH, fd, 0, parts(block))
    assert queue.num_in_flight == DEPTH
    assert wait(queue, DEPTH) == dict.fromkeys(range(DEPTH), PAGE)
    assert queue.num_in_flight == 0
    assert queue.submit_write(DEPTH, fd, 0, parts(block))
    wait(queue, 1)


def test_many_transfers_in_any_order(queue: DiskQueue, fd: int) -> None:
    num_blocks = 200
    blocks = [filled(2, seed) for seed in range(num_blocks)]
    for submit, targets in (
        (queue.submit_write, blocks),
        (queue.submit_read, [aligned_bytes(2 * PAGE) for _ in blocks]),
    ):
        order = random.Random(chosen_seed(0)).sample(range(num_blocks), num_blocks)
        ended: dict[int, int] = {}
        while len(ended) < num_blocks:
            while order and submit(order[-1], fd, order[-1] * 2 * PAGE, parts(targets[order[-1]])):
                order.pop()
            ended |= wait(queue, 1)
        assert set(ended.values()) == {2 * PAGE}
        assert all((a == b).all() for a, b in zip(blocks, targets, strict=True))


def test_the_event_fd_is_quiet_after_poll(queue: DiskQueue, fd: int) -> None:
    queue.submit_write(1, fd, 0, parts(filled(1, 0)))
    wait(queue, 1)
    assert not select.select([queue.fd], [], [], 0)[0]
    assert queue.poll() == []


def test_errors_of_the_system_are_results(queue: DiskQueue, fd: int, tmp_path: Path) -> None:
    page = filled(1, 0)
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    closed = os.dup(fd)
    os.close(closed)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert queue.submit_write(1, read_only, 0, parts(page))
        assert queue.submit_write(2, closed, 0, parts(page))
        assert queue.submit_read(3, folder, 0, parts(page))
        assert queue.submit_write(4, fd, 0, [(2**46, PAGE)])
        results = wait(queue, 4)
    finally:
        os.close(read_only)
        os.close(folder)
    assert results == {1: -errno.EBADF, 2: -errno.EBADF, 3: -errno.EISDIR, 4: -errno.EFAULT}


def test_an_io_error_is_a_result(queue: DiskQueue) -> None:
    """The last page of a process's memory file fails like a bad sector: EIO."""
    fd = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        queue.submit_read(1, fd, 0, parts(aligned_bytes(PAGE)))
        assert wait(queue, 1) == {1: -errno.EIO}
    finally:
        os.close(fd)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_short_write_is_continued(engine: str, tmp_path: Path) -> None:
    script = (
        "import os, resource, select, signal, sys\n"
        "from banaserve._native import DiskQueue\n"
        "from banaserve.kvstore.tiers.ssd.files import aligned_bytes\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "queue = DiskQueue(1, sys.argv[1])\n"
        "fd = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)\n"
        "block = aligned_bytes(16384)\n"
        "queue.submit_write(1, fd, 0, [(block.ctypes.data, 16384)])\n"
        "while not (ended := queue.poll()):\n"
        "    select.select([queue.fd], [], [])\n"
        "print(ended)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, engine, str(tmp_path / "file")],
        capture_output=True,
        text=True,
        check=True,
    )
    # The write goes as far as it can, and its continuation fails.
    assert done.stdout == f"[(1, {-errno.EFBIG})]\n"


@pytest.mark.parametrize(
    ("offset", "address", "num_bytes", "said"),
    [
        (1, 0, PAGE, "multiples of 4096"),
        (512, 0, PAGE, "multiples of 4096"),
        (0, 8, PAGE, "multiples of 4096"),
        (0, 0, 100, "multiples of 4096"),
        (-PAGE, 0, PAGE, "negative"),
        (0, 0, 0, "not positive"),
        (0, 0, -PAGE, "not positive"),
        (2**63 - PAGE, 0, PAGE, "largest offset"),
    ],
)
def test_bad_arguments_are_named(
    queue: DiskQueue, fd: int, offset: int, address: int, num_bytes: int, said: str
) -> None:
    base = aligned_bytes(2 * PAGE)
    for submit in (queue.submit_read, queue.submit_write):
        with pytest.raises(ValueError, match=said):
            submit(1, fd, offset, [(base.ctypes.data + address, num_bytes)])
    assert queue.num_in_flight == 0


def test_parts_are_checked(queue: DiskQueue, fd: int) -> None:
    page = parts(aligned_bytes(PAGE))
    for wrong, said in (([], "1 to 16"), (page * 17, "1 to 16"), ([(0, PAGE)], "null")):
        with pytest.raises(ValueError, match=said):
            queue.submit_read(1, fd, 0, wrong)


@pytest.mark.parametrize(
    ("depth", "engine", "said"),
    [(0, "auto", "depth"), (4097, "auto", "depth"), (1, "liburing", "engine"), (1, "", "engine")],
)
def test_bad_queues_are_refused(depth: int, engine: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DiskQueue(depth, engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_close_waits_for_what_is_under_way(engine: str, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    queue = DiskQueue(DEPTH, engine)
    blocks = [filled(512, seed) for seed in range(DEPTH)]
    for tag, block in enumerate(blocks):
        queue.submit_write(tag, fd, tag * block.nbytes, parts(block))
    queue.close()
    assert (tmp_path / "file").read_bytes() == b"".join(map(bytes, blocks))
    assert dict(queue.poll()) == dict.fromkeys(range(DEPTH), 512 * PAGE)
    with pytest.raises(ValueError, match="closed"):
        queue.submit_read(1, fd, 0, parts(blocks[0]))
    queue.close()
    os.close(fd)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_queue_that_is_dropped_leaves_nothing_behind(engine: str, tmp_path: Path) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for seed in range(20):
        queue = DiskQueue(DEPTH, engine)
        block = filled(64, seed)
        queue.submit_write(1, fd, 0, parts(block))
        del queue
        assert (tmp_path / "file").read_bytes() == bytes(block)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    os.close(fd)


FORBIDDEN = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
# seccomp: io_uring_setup (425) fails with EPERM, everything else is allowed.
code = b"".join(struct.pack("HBBI", *i) for i in [
    (0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])
memory = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
from banaserve._native import DiskQueue
queue = DiskQueue(1)
print(queue.engine, "|", queue.fallback_reason)
try:
    DiskQueue(1, "io_uring")
except OSError as error:
    print(error)
"""


def test_auto_falls_back_where_io_uring_is_forbidden() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "threads | io_uring_setup: Operation not permitted"
    assert "Operation not permitted" in lines[1]


@needs_io_uring
def test_auto_takes_io_uring_where_it_works() -> None:
    queue = DiskQueue(1)
    assert queue.engine == DiskQueue(1, "io_uring").engine == "io_uring"
    assert queue.fallback_reason == ""
