"""Block copies in native code."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import xxhash

from banaserve import _native
from depth import seeds

SIZE = 64


def copy(
    dst_offsets: list[int],
    src_offsets: list[int],
    num_bytes: int,
    *,
    dst_size: int = SIZE,
    src_size: int = SIZE,
) -> bytes:
    source = np.arange(SIZE, dtype=np.uint8)
    target = np.full(SIZE, 255, dtype=np.uint8)
    _native.copy_regions(
        target.ctypes.data,
        source.ctypes.data,
        np.array(dst_offsets, dtype=np.int64),
        np.array(src_offsets, dtype=np.int64),
        num_bytes,
        dst_size,
        src_size,
    )
    return target.tobytes()


def test_scattered_copies() -> None:
    target = copy([0, 60, 8], [16, 0, 32], 4)
    assert target[0:4] == bytes([16, 17, 18, 19])
    assert target[60:64] == bytes([0, 1, 2, 3])
    assert target[8:12] == bytes([32, 33, 34, 35])
    assert target.count(255) == SIZE - 12


@pytest.mark.parametrize(("offsets", "num_bytes"), [([], 8), ([0, 1], 0)])
def test_nothing_to_copy(offsets: list[int], num_bytes: int) -> None:
    assert copy(offsets, offsets, num_bytes) == b"\xff" * SIZE


@pytest.mark.parametrize(
    ("dst_offsets", "src_offsets", "num_bytes", "sizes", "named"),
    [
        ([0, 61], [0, 0], 4, {}, r"dst_offsets\[1\]"),
        ([-1], [0], 4, {}, r"dst_offsets\[0\]"),
        ([0], [61], 4, {}, r"src_offsets\[0\]"),
        ([0], [2**63 - 1], 4, {}, r"src_offsets\[0\]"),
        ([0], [0], 2**63 - 1, {}, "dst_size"),
        ([0], [0], -1, {}, "num_bytes"),
        ([0], [0], 4, {"dst_size": 3}, "dst_size"),
        ([0], [0], 4, {"src_size": -1}, "src_size"),
        ([0, 1], [0], 1, {}, "src_offsets"),
    ],
)
def test_refusals_name_the_argument(
    dst_offsets: list[int],
    src_offsets: list[int],
    num_bytes: int,
    sizes: dict[str, int],
    named: str,
) -> None:
    with pytest.raises(ValueError, match=named):
        copy(dst_offsets, src_offsets, num_bytes, **sizes)


@pytest.mark.parametrize(("dst", "fits"), [(0, False), (3, False), (4, True)])
def test_overlap_is_refused(dst: int, fits: bool) -> None:
    memory = np.arange(SIZE, dtype=np.uint8)
    zero = np.zeros(1, dtype=np.int64)
    arguments = (
        memory.ctypes.data, memory.ctypes.data, zero + dst, zero, 4, SIZE, SIZE,
    )  # fmt: skip
    if fits:
        _native.copy_regions(*arguments)
        assert bytes(memory[4:8]) == bytes([0, 1, 2, 3])
    else:
        with pytest.raises(ValueError, match="overlaps"):
            _native.copy_regions(*arguments)


def test_null_and_wrong_types_are_refused() -> None:
    offsets = np.zeros(1, dtype=np.int64)
    memory = np.zeros(SIZE, dtype=np.uint8)
    with pytest.raises(ValueError, match="dst_base"):
        _native.copy_regions(0, memory.ctypes.data, offsets, offsets, 1, SIZE, SIZE)
    with pytest.raises(TypeError):
        _native.copy_regions(
            memory.ctypes.data, memory.ctypes.data, offsets.astype(np.int32), offsets, 1, SIZE, SIZE
        )


@pytest.mark.parametrize("num_bytes", [0, 1, 31, 32, 33, 127, 128, 129, 4096, 70_001])
def test_streaming_copies_the_same_bytes(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes + 300, dtype=np.uint8)
    for dst, src in [(0, 0), (1, 0), (31, 7), (32, 1), (100, 200)]:
        target = np.full(num_bytes + 300, 7, dtype=np.uint8)
        expected = target.copy()
        expected[dst : dst + num_bytes] = source[src : src + num_bytes]
        _native.copy_regions(
            target.ctypes.data, source.ctypes.data, np.array([dst]), np.array([src]),
            num_bytes, target.size, source.size, streaming=True,
        )  # fmt: skip
        assert (target == expected).all()


KINDS = ["cached", "streaming", *_native.copy_instructions()]


def call(function: Any, kind: str, target: Any, source: Any, dst: Any, src: Any, size: int) -> Any:
    return function(
        target.ctypes.data, source.ctypes.data, np.array(dst), np.array(src), size,
        target.nbytes, source.nbytes, streaming=kind != "cached",
        instructions="" if kind in ("cached", "streaming") else kind,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", seeds(3, 3))
def test_scattered_copies_and_their_checksum(kind: str, seed: int) -> None:
    draws = np.random.default_rng(seed)
    for _ in range(60):
        size = int(draws.choice([0, 1, 31, 63, 64, 65, 240, 256, 257, 8191, 8192, 8193, 20_000]))
        count = int(draws.integers(0, 5))
        source = draws.integers(0, 256, 100_001, dtype=np.uint8)
        target = draws.integers(0, 256, count * (size + 70) + 70, dtype=np.uint8)
        src = draws.integers(0, source.size - size, count)
        # In an order of their own, with gaps, so that what lies between them is looked at too.
        dst = draws.permutation(count) * (size + 70) + draws.integers(0, 70, count)
        expected = target.copy()
        for to, of in zip(dst, src, strict=True):
            expected[to : to + size] = source[of : of + size]
        copied = target.copy()
        assert call(_native.copy_regions, kind, copied, source, dst, src, size) is None
        assert (copied == expected).all()
        value = call(_native.copy_regions_checksummed, kind, target, source, dst, src, size)
        assert (target == expected).all()
        assert value == xxhash.xxh3_64_intdigest(b"".join(source[of : of + size] for of in src))


@pytest.mark.parametrize(
    ("streaming", "instructions", "named"),
    [(True, "sse9", "copy_instructions"), (False, "avx2", "streaming")],
)
def test_instructions_that_are_not_there_are_refused(streaming, instructions, named) -> None:
    memory, zero = np.zeros(SIZE, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for function in (_native.copy_regions, _native.copy_regions_checksummed):
        with pytest.raises(ValueError, match=named):
            function(
                memory.ctypes.data, memory.ctypes.data, zero + 8, zero, 4, SIZE, SIZE,
                streaming, instructions,
            )  # fmt: skip


def test_a_checksummed_copy_refuses_what_a_plain_one_refuses() -> None:
    memory, zero = np.zeros(SIZE, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    with pytest.raises(ValueError, match=r"dst_offsets\[0\]"):
        call(_native.copy_regions_checksummed, "cached", memory, memory, zero + 61, zero, 4)
    with pytest.raises(ValueError, match="overlaps"):
        call(_native.copy_regions_checksummed, "cached", memory, memory, zero, zero, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_checksum_is_of_what_was_written_while_the_source_changes(kind: str) -> None:
    # Large enough for many turns of the writer within one copy.
    source, target = (np.zeros(8 << 20, dtype=np.uint8) for _ in range(2))
    ended = threading.Event()

    def change() -> None:
        value = 0
        while not ended.is_set():
            value = (value + 1) % 256
            source[:] = value

    writer = threading.Thread(target=change)
    writer.start()
    try:
        for _ in range(4):
            checksum = call(
                _native.copy_regions_checksummed, kind, target, source, [0], [0], source.size
            )
            assert checksum == xxhash.xxh3_64_intdigest(target)
    finally:
        ended.set()
        writer.join()
