"""Fuzzes the boundaries of banaserve._native against plain models: ``fuzz.py [ROUNDS] [SEED]``.

Meant for a build with sanitizers: every array is of the exact size that native code is told, so
that a byte too many is seen. The same rounds and seed do the same.
"""

from __future__ import annotations

import errno
import os
import random
import select
import sys
import tempfile

import numpy as np
import xxhash

from banaserve import _native

SIZES = (0, 1, 2, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4095, 4097, 8191)
SIZES += (8192, 8193, 16384, 20_001)
KINDS = (None, "", *_native.copy_instructions())
FAR = (2**63 - 1, 2**62, -1, -(2**63))
PAGE = 4096


def fuzz_copies(draws: random.Random) -> None:
    """Valid copies against numpy, and offsets that must be refused before a byte has moved."""
    num_bytes, count = draws.choice(SIZES), draws.randint(0, 6)
    source = np.frombuffer(draws.randbytes(num_bytes + draws.randint(0, 130)), np.uint8).copy()
    target = np.frombuffer(draws.randbytes(num_bytes + draws.randint(0, 130)), np.uint8).copy()
    if draws.random() < 0.3:
        source = target  # overlaps are possible
    offsets = [
        [draws.randint(0, array.size - num_bytes) for _ in range(count)]
        for array in (target, source)
    ]
    if count and draws.random() < 0.3:
        side, at = draws.randint(0, 1), draws.randrange(count)
        limit = (target, source)[side].size - num_bytes
        offsets[side][at] = draws.choice((*FAR, limit + 1, limit + 64))
    expected = model_of_copies(target, source, offsets, num_bytes)
    before = target.copy()
    kind, sums = draws.choice(KINDS), draws.random() < 0.5
    function = _native.copy_regions_checksummed if sums else _native.copy_regions
    try:
        value = function(
            target.ctypes.data, source.ctypes.data, *(np.array(o, np.int64) for o in offsets),
            num_bytes, target.size, source.size, kind is not None, kind or "",
        )  # fmt: skip
    except ValueError:
        assert expected is None, "refused what is fine"
        assert (target == before).all(), "refused after it had begun"
        return
    assert expected is not None, "took what leaves its memory or overlaps"
    bytes_after, moved = expected
    assert (target == bytes_after).all()
    assert not sums or value == xxhash.xxh3_64_intdigest(moved)


def model_of_copies(target, source, offsets, num_bytes):
    """``(target afterwards, bytes moved)``; None where the copies must be refused."""
    after, moved = target.copy(), []
    read_from = after if source is target else source
    if num_bytes:
        for to, of in zip(*offsets, strict=True):
            inside = 0 <= to <= target.size - num_bytes and 0 <= of <= source.size - num_bytes
            if not inside or (source is target and abs(to - of) < num_bytes):
                return None
            moved.append(read_from[of : of + num_bytes].tobytes())
            after[to : to + num_bytes] = np.frombuffer(moved[-1], np.uint8)
    return after, b"".join(moved)


def pages(count: int) -> np.ndarray:
    """Zeroed memory that starts at a page."""
    memory = np.zeros((count + 1) * PAGE, np.uint8)
    first = -memory.ctypes.data % PAGE
    return memory[first : first + count * PAGE]


def places(parts: list[np.ndarray]) -> list[tuple[int, int]]:
    return [(part.ctypes.data, part.nbytes) for part in parts]


def fuzz_disk(draws: random.Random, engine: str) -> None:
    """Reads at any page of a file, short ones at its odd end, wrong files, then writes."""
    queue = _native.DiskQueue(draws.randint(1, 8), engine)
    with tempfile.TemporaryFile() as file:
        content = draws.randbytes(draws.choice((0, 1, PAGE - 1, PAGE, PAGE + 1, 30_000)))
        file.write(content)
        file.flush()
        reads = {}
        for tag in range(draws.randint(1, queue.depth)):
            offset = draws.randint(0, 9) * PAGE
            parts = [pages(draws.randint(1, 3)) for _ in range(draws.randint(1, 5))]
            fd = -1 if draws.random() < 0.1 else file.fileno()
            assert queue.submit_read(tag, fd, offset, places(parts))
            reads[tag] = (fd, offset, parts)
        for tag, result in finish(queue, len(reads)).items():
            fd, offset, parts = reads[tag]
            there = content[offset : offset + sum(part.nbytes for part in parts)]
            assert result == (len(there) if fd >= 0 else -errno.EBADF)
            read = b"".join(part.tobytes() for part in parts)
            assert fd < 0 or read == there.ljust(len(read), b"\0")
        check_refusals(draws, queue, file.fileno())
        check_writes(draws, queue, file.fileno())
    queue.close()


def check_refusals(draws: random.Random, queue: _native.DiskQueue, fd: int) -> None:
    """What is no transfer is refused before the system hears of it."""
    memory = pages(1)
    address = memory.ctypes.data
    odd = draws.randint(1, PAGE - 1)
    for offset, parts in [
        (odd, [(address, PAGE)]),
        (0, [(address + odd, PAGE)]),
        (0, [(address, odd)]),
        (0, [(address, PAGE)] * 17),
        (0, []),
        (0, [(address, 0)]),
        (0, [(address, -PAGE)]),
        (0, [(0, PAGE)]),
        (-PAGE, [(address, PAGE)]),
        (2**63 - PAGE, [(address, PAGE)]),
    ]:
        try:
            queue.submit_read(0, fd, offset, parts)
        except ValueError:
            continue
        raise AssertionError(f"took {offset}, {parts}")
    assert queue.num_in_flight == 0


def check_writes(draws: random.Random, queue: _native.DiskQueue, fd: int) -> None:
    """Writes beside each other, read back by the system's own call; none beyond the depth."""
    writes, at = {}, 0
    for tag in range(queue.depth):
        parts = [pages(draws.randint(1, 3)) for _ in range(draws.randint(1, 4))]
        for part in parts:
            part[:] = np.frombuffer(draws.randbytes(part.nbytes), np.uint8)
        at += draws.randint(0, 2) * PAGE
        assert queue.submit_write(tag, fd, at, places(parts))
        writes[tag] = (at, b"".join(part.tobytes() for part in parts), parts)
        at += sum(part.nbytes for part in parts)
    assert not queue.submit_read(99, fd, 0, places([pages(1)])), "took more than its depth"
    for tag, result in finish(queue, len(writes)).items():
        start, data, _ = writes[tag]
        assert result == len(data)
        assert os.pread(fd, len(data), start) == data


def finish(queue: _native.DiskQueue, count: int) -> dict[int, int]:
    """The results of ``count`` transfers by their tags."""
    ended: dict[int, int] = {}
    while len(ended) < count:
        select.select([queue.fd], [], [], 20.0)
        ended.update(queue.poll())
    assert len(ended) == count
    return ended


def engines() -> list[str]:
    """Those that this system allows."""
    auto = _native.DiskQueue(1, "auto")
    found = {"threads", auto.engine}
    auto.close()
    return sorted(found)


def main(rounds: int = 20, seed: int = 0) -> None:
    """100 rounds of copies and 2 of disk transfers for each engine, ``rounds`` times."""
    known = engines()
    for i in range(rounds):
        draws = random.Random(f"{seed}/{i}")
        try:
            for _ in range(100):
                fuzz_copies(draws)
            for engine in known:
                fuzz_disk(draws, engine)
                fuzz_disk(draws, engine)
        except AssertionError:
            print(f"failed in round {i} of seed {seed}", file=sys.stderr)
            raise
    print(f"fuzz: {rounds} rounds of seed {seed}, engines {', '.join(known)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
