"""Hostile bytes: the decoder of headers, the scan of files, the check of folders."""

from __future__ import annotations

import os
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.ssd.check import check_folder
from banaserve.kvstore.tiers.ssd.record import (
    MAGIC,
    MAX_BLOCK_BYTES,
    MAX_SEQUENCE,
    PAGE_BYTES,
    Kind,
    RecordError,
    RecordHeader,
    checksum,
    decode,
    encode,
    padded,
)
from banaserve.kvstore.tiers.ssd.scan import Found, payload_is_good, scan
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from depth import num_examples

SEGMENT_ID = 1
FIELDS = struct.Struct("<8sIIQQQQQQHH")
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

keys = st.binary(min_size=32, max_size=80)
sequences = st.integers(0, MAX_SEQUENCE)
headers = st.builds(
    RecordHeader,
    kind=st.just(Kind.BLOCK),
    segment_id=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    num_bytes=st.integers(1, MAX_BLOCK_BYTES),
    sequence=sequences,
    age=sequences,
    checksum=st.integers(0, 2**64 - 1),
    key=keys,
    parent=st.none() | keys,
) | st.builds(
    RecordHeader,
    kind=st.just(Kind.FILLER),
    segment_id=st.integers(0, 2**64 - 1),
    offset=st.integers(0, 2**64 - 1),
    num_bytes=st.integers(0, 2**64 - 1),
    sequence=sequences,
    age=sequences,
    checksum=st.integers(0, 2**64 - 1),
    key=st.just(b""),
    parent=st.none(),
)


def sealed(body: bytes) -> bytes:
    """A page with a good checksum, whatever else it says."""
    body = body.ljust(PAGE_BYTES - 8, b"\0")[: PAGE_BYTES - 8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


@given(headers)
def test_headers_come_back(header: RecordHeader) -> None:
    page = encode(header)
    assert len(page) == PAGE_BYTES
    assert decode(page, header.segment_id, header.offset) == header


@given(headers, st.integers(0, PAGE_BYTES * 8 - 1))
def test_any_flipped_bit_is_found(header: RecordHeader, bit: int) -> None:
    page = bytearray(encode(header))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode(bytes(page), header.segment_id, header.offset)


@given(headers, st.integers(0, PAGE_BYTES - 1))
def test_a_cut_page_is_refused(header: RecordHeader, num_bytes: int) -> None:
    with pytest.raises(RecordError):
        decode(encode(header)[:num_bytes], header.segment_id, header.offset)


@given(headers, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_header_elsewhere_is_refused(header: RecordHeader, segment_id: int, offset: int) -> None:
    assume((segment_id, offset) != (header.segment_id, header.offset))
    with pytest.raises(RecordError, match="elsewhere"):
        decode(encode(header), segment_id, offset)


u32, u64, u16 = (st.integers(0, 2**bits - 1) for bits in (32, 64, 16))


@given(
    version=st.just(1) | u32,
    kind=st.sampled_from([1, 2]) | u32,
    numbers=st.tuples(u64, u64, u64, u64),
    lengths=st.tuples(st.integers(0, 100) | u16, st.integers(0, 100) | u16),
    names=st.binary(max_size=200),
)
@example(1, 1, (2**64 - 1, 1, 1, 0), (32, 0), b"k" * 32)
@example(1, 1, (1, 2**64 - 1, 1, 0), (32, 0), b"k" * 32)
@example(1, 1, (0, 1, 1, 0), (32, 0), b"k" * 32)
@example(1, 1, (1, 1, 1, 0), (65535, 65535), b"k" * 200)
@example(1, 2, (1, 1, 1, 0), (32, 32), b"k" * 160)
def test_hostile_headers_with_good_checksums(
    version: int,
    kind: int,
    numbers: tuple[int, int, int, int],
    lengths: tuple[int, int],
    names: bytes,
) -> None:
    page = sealed(FIELDS.pack(MAGIC, version, kind, SEGMENT_ID, 0, *numbers, *lengths) + names)
    try:
        header = decode(page, SEGMENT_ID, 0)
    except RecordError:
        return
    assert encode(header) == page
    if header.kind is Kind.BLOCK:
        assert 0 < header.num_bytes <= MAX_BLOCK_BYTES
        assert 32 <= len(header.key) <= 80
    assert header.sequence <= MAX_SEQUENCE


@given(st.binary(max_size=PAGE_BYTES + 1))
def test_noise_is_refused(noise: bytes) -> None:
    for page in (noise, MAGIC + noise, sealed(noise), sealed(MAGIC + noise)):
        with pytest.raises(RecordError):
            decode(page, SEGMENT_ID, 0)


# What files are put together from: (kind, number, size).
pieces = st.lists(
    st.tuples(
        st.sampled_from(["block", "block", "torn", "flipped", "noise", "blank", "liar", "filler"]),
        st.integers(0, 5),
        st.integers(1, 3 * PAGE_BYTES),
    ),
    max_size=8,
)


def payload(number: int, num_bytes: int) -> bytes:
    return bytes([number + 1]) * num_bytes


def record(offset: int, number: int, num_bytes: int, sequence: int) -> bytes:
    data = payload(number, num_bytes)
    header = RecordHeader(
        Kind.BLOCK, SEGMENT_ID, offset, num_bytes, sequence, sequence, checksum(data),
        bytes([number]) * 32, None,
    )  # fmt: skip
    return encode(header) + data.ljust(padded(num_bytes), b"\0")


def piece(kind: str, number: int, num_bytes: int, offset: int, sequence: int) -> bytes:
    good = record(offset, number, num_bytes, sequence)
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
        case "liar":
            huge = MAX_BLOCK_BYTES if number % 2 else 2**64 - 1
            header = RecordHeader(Kind.FILLER, SEGMENT_ID, offset, huge, 1, 1, 0, b"", None)
            return encode(header) + bytes(padded(num_bytes))
        case "filler":
            header = RecordHeader(Kind.FILLER, SEGMENT_ID, offset, num_bytes, 1, 1, 0, b"", None)
            return encode(header) + b"\xff" * padded(num_bytes)
        case _:
            return good


def assemble(parts: list[tuple[str, int, int]], cut: int) -> bytes:
    content = b""
    for sequence, (kind, number, num_bytes) in enumerate(parts, 1):
        content += piece(kind, number, num_bytes, len(content), sequence)
    return content[: len(content) - cut] if cut < len(content) else content


@contextmanager
def folder_with(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        folder = Path(name)
        (folder / "format").write_bytes(b"banaserve ssd log 1\n")
        (folder / "lock").write_bytes(b"1\n")
        (folder / f"segment-{SEGMENT_ID:016x}.log").write_bytes(content)
        yield folder


@settings(max_examples=num_examples(200))
@given(pieces, st.integers(0, 2 * PAGE_BYTES))
def test_any_file_can_be_scanned(parts: list[tuple[str, int, int]], cut: int) -> None:
    content = assemble(parts, cut)
    with folder_with(content) as folder, next(folder.glob("segment-*")).open("rb") as file:
        end = 0
        for item in scan(file.fileno(), SEGMENT_ID):
            offset = item.header.offset if isinstance(item, Found) else item.offset
            length = item.header.record_bytes if isinstance(item, Found) else item.num_bytes
            assert end <= offset
            assert length > 0
            end = offset + length
            assert end <= len(content)
            if isinstance(item, Found) and item.header.kind is Kind.BLOCK:
                data = content[offset + PAGE_BYTES :][: item.header.num_bytes]
                good = data == payload(item.header.key[0], item.header.num_bytes)
                assert payload_is_good(file.fileno(), item.header) == good


@settings(max_examples=num_examples(100))
@given(pieces, st.integers(0, 2 * PAGE_BYTES))
def test_any_folder_opens_and_serves_only_what_is_right(
    parts: list[tuple[str, int, int]], cut: int
) -> None:
    with folder_with(assemble(parts, cut)) as folder:
        before = check_folder(folder)
        tier = SsdTier(folder, 2**24, engine="threads", queue_depth=1)
        tier.check()
        found = [n for n in range(6) if tier.lookup([bytes([n]) * 32]) == [Lookup.HIT]]
        assert len(found) == before.num_ok
        tier.close()
        after = check_folder(folder)
        assert after.is_clean, after.problems
        assert after.num_ok == len(found)


def test_hostile_sizes_take_no_memory(tmp_path: Path) -> None:
    """A sparse file that claims a block of a gibibyte."""
    header = RecordHeader(Kind.BLOCK, SEGMENT_ID, 0, MAX_BLOCK_BYTES, 1, 1, 0, b"k" * 32, None)
    with folder_with(encode(header)) as folder:
        os.truncate(next(folder.glob("segment-*")), PAGE_BYTES + MAX_BLOCK_BYTES)
        tracemalloc.start()
        report = check_folder(folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (report.num_ok, report.num_torn) == (0, 1)
    assert peak_bytes < 8 * 2**20
