"""Hostile bytes: the decoder of headers, the recovery and the check of folders."""

from __future__ import annotations

import os
import select
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import Completion, TierOutcome
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.folder import block_name
from banaserve.kvstore.tiers.ssd.record import (
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_SEQUENCE,
    PAGE_BYTES,
    RecordError,
    RecordHeader,
    checksum,
    decode,
    encode,
    padded,
)
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from depth import num_examples

FIELDS = struct.Struct("<8sIQQQHH")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

keys = st.binary(min_size=32, max_size=80)
sequences = st.integers(0, MAX_SEQUENCE)
headers = st.builds(
    RecordHeader,
    num_bytes=st.integers(1, MAX_BLOCK_BYTES),
    sequence=sequences,
    checksum=st.integers(0, 2**64 - 1),
    key=keys,
    parent=st.none() | keys,
)


def sealed(body: bytes) -> bytes:
    """A page with a good checksum, whatever else it says."""
    body = body.ljust(PAGE_BYTES - 8, b"\0")[: PAGE_BYTES - 8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@given(headers)
def test_headers_come_back(header: RecordHeader) -> None:
    page = encode(header)
    assert len(page) == PAGE_BYTES
    assert decode(page) == header


@given(headers, st.integers(0, PAGE_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(header: RecordHeader, bit: int) -> None:
    page = bytearray(encode(header))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode(bytes(page))


@given(headers, st.integers(0, PAGE_BYTES - 1))
def test_a_cut_page_is_refused(header: RecordHeader, num_bytes: int) -> None:
    with pytest.raises(RecordError):
        decode(encode(header)[:num_bytes])


u32, u64, u16 = (st.integers(0, 2**bits - 1) for bits in (32, 64, 16))


@given(
    version=st.just(2) | u32,
    numbers=st.tuples(u64, u64, u64),
    lengths=st.tuples(st.integers(0, 100) | u16, st.integers(0, 100) | u16),
    names=st.binary(max_size=200),
)
@example(2, (2**64 - 1, 1, 0), (32, 0), b"k" * 32)
@example(2, (1, 2**64 - 1, 0), (32, 0), b"k" * 32)
@example(2, (0, 1, 0), (32, 0), b"k" * 32)
@example(2, (1, 1, 0), (65535, 65535), b"k" * 200)
@example(2, (1, 1, 0), (32, 0), b"k" * 32)
def test_hostile_headers_with_good_checksums(
    version: int, numbers: tuple[int, int, int], lengths: tuple[int, int], names: bytes
) -> None:
    page = sealed(FIELDS.pack(MAGIC, version, *numbers, *lengths) + names)
    try:
        header = decode(page)
    except RecordError:
        return
    assert encode(header) == page
    assert 0 < header.num_bytes <= MAX_BLOCK_BYTES
    assert 32 <= len(header.key) <= 80
    assert header.sequence <= MAX_SEQUENCE


@given(st.binary(max_size=PAGE_BYTES + 1))
def test_noise_is_refused(noise: bytes) -> None:
    for page in (noise, MAGIC + noise, sealed(noise), sealed(MAGIC + noise)):
        with pytest.raises(RecordError):
            decode(page)


# What files hold: (kind, number, size).
pieces = st.lists(
    st.tuples(
        st.sampled_from(["block", "torn", "flipped", "noise", "blank", "empty", "liar", "more"]),
        st.integers(0, 5),
        st.integers(1, 3 * PAGE_BYTES),
    ),
    max_size=8,
)


def key(number: int) -> bytes:
    return bytes([number]) * 32


def payload(number: int, num_bytes: int) -> bytes:
    return bytes([number + 1]) * num_bytes


def record(number: int, num_bytes: int, sequence: int) -> bytes:
    data = payload(number, num_bytes)
    header = RecordHeader(num_bytes, sequence, checksum(data), key(number), None)
    return encode(header) + data.ljust(padded(num_bytes), b"\0")


def piece(kind: str, number: int, num_bytes: int, sequence: int) -> bytes:
    good = record(number, num_bytes, sequence)
    match kind:
        case "torn":
            return good[: -PAGE_BYTES // 2]
        case "flipped":
            spoilt = bytearray(good)
            spoilt[num_bytes * 7 % len(good)] ^= 1 << number
            return bytes(spoilt)
        case "noise":
            return bytes(range(256)) * (num_bytes // 256)
        case "blank":
            return bytes(padded(num_bytes))
        case "empty":
            return b""
        case "liar":
            header = RecordHeader(MAX_BLOCK_BYTES, sequence, 0, key(number), None)
            return encode(header) + bytes(padded(num_bytes))
        case "more":
            return good + bytes(num_bytes)
        case _:
            return good


@contextmanager
def folder_with(*files: tuple[str, bytes]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        SsdTier(folder, 2**24, queue_depth=1).close()
        for path, content in files:
            (folder / path).write_bytes(content)
        yield folder


@settings(max_examples=num_examples(100))
@given(pieces)
def test_any_folder_opens_and_serves_only_what_is_right(parts: list[tuple[str, int, int]]) -> None:
    files = [
        (block_name(key(number), sequence), piece(kind, number, num_bytes, sequence))
        for sequence, (kind, number, num_bytes) in enumerate(parts, 1)
    ]
    sizes = {number: num_bytes for _, number, num_bytes in parts}
    with folder_with(*files) as folder:
        before = check_folder(folder)
        tier = SsdTier(folder, 2**24, queue_depth=1)
        tier.check()
        found = [n for n in range(6) if tier.lookup([key(n)]) == [Lookup.HIT]]
        good = [n for n in found if load(tier, n, sizes[n]) == payload(n, sizes[n])]
        assert [n for n in range(6) if tier.lookup([key(n)]) == [Lookup.HIT]] == good
        # An older file of a key does not stand in for a newer one that is damaged.
        assert len(good) <= before.num_ok
        while not tier.is_idle:
            wait(tier)
        tier.check()
        tier.close()
        after = check_folder(folder)
        assert after.is_clean, after.problems
        assert after.num_ok == len(good)


def wait(tier: SsdTier) -> list[Completion]:
    assert select.select([tier.fd], [], [], 20.0)[0], "the tier is silent"
    return tier.poll()


def load(tier: SsdTier, number: int, num_bytes: int) -> bytes | None:
    target = aligned_bytes(num_bytes)
    assert tier.submit_load(key(number), target) is not None
    while not (ended := wait(tier)):
        pass
    return bytes(target) if ended[0].outcome is TierOutcome.DONE else None


def test_hostile_sizes_take_no_memory() -> None:
    """A sparse file that claims a block of a gibibyte."""
    header = RecordHeader(MAX_BLOCK_BYTES, 1, 0, key(1), None)
    name = block_name(key(1), 1)
    with folder_with((name, encode(header))) as folder:
        os.truncate(folder / name, PAGE_BYTES + MAX_BLOCK_BYTES)
        tracemalloc.start()
        report = check_folder(folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (report.num_ok, report.num_corrupt) == (0, 1)
    assert peak_bytes < 8 * 2**20
