"""Scan of a segment file, header by header; damaged parts are skipped page by page."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from banaserve.kvstore.tiers.ssd.record import (
    MAGIC,
    PAGE_BYTES,
    RecordError,
    RecordHeader,
    decode,
    is_blank,
)

_WINDOW_BYTES = 2**20


class Found(NamedTuple):
    """Record whose header is good; its bytes were not checked."""

    header: RecordHeader


class Damage(NamedTuple):
    """Run of pages that belong to no record.

    Attributes:
        torn: True if the run is at the end of the file, where a write was cut short, and not
            between good records.
    """

    offset: int
    num_bytes: int
    torn: bool


def open_to_read(path: Path) -> int:
    """Open a segment for ``scan``, safely even if another kind of file was put in its place.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def scan(fd: int, segment_id: int) -> Iterator[Found | Damage]:
    """Yield the records and damaged runs of a segment in file order; blank pages are skipped.

    Args:
        fd: File descriptor of the segment, without O_DIRECT.
        segment_id: Id of the segment.

    Raises:
        OSError: The file cannot be read.
    """
    size = os.fstat(fd).st_size
    offset = 0
    damage_start: int | None = None
    damage_end = 0
    while offset + PAGE_BYTES <= size:
        page = os.pread(fd, PAGE_BYTES, offset)
        header = _header(page, segment_id, offset, size)
        if header is not None:
            if damage_start is not None:
                yield Damage(damage_start, damage_end - damage_start, torn=False)
                damage_start = None
            yield Found(header)
            offset += header.record_bytes
            continue
        if is_blank(page):
            offset = _next_data(fd, offset + PAGE_BYTES, size)
            continue
        if damage_start is None:
            damage_start = offset
        offset = _next_candidate(fd, offset + PAGE_BYTES, size)
        damage_end = offset
    if size > offset:
        damage_start, damage_end = (offset if damage_start is None else damage_start), size
    if damage_start is not None:
        yield Damage(damage_start, damage_end - damage_start, torn=True)


def payload_is_good(fd: int, header: RecordHeader) -> bool:
    """Return whether a record's bytes match its checksum. Reads them a MiB at a time.

    Raises:
        OSError: The file cannot be read.
    """
    digest = xxhash.xxh3_64()
    buffer = bytearray(min(header.num_bytes, _WINDOW_BYTES))
    position, end = header.offset + PAGE_BYTES, header.offset + PAGE_BYTES + header.num_bytes
    while position < end:
        window = memoryview(buffer)[: end - position]
        num_read = os.preadv(fd, [window], position)
        if not num_read:
            return False
        digest.update(window[:num_read])
        position += num_read
    return bool(digest.intdigest() == header.checksum)


def _header(page: bytes, segment_id: int, offset: int, size: int) -> RecordHeader | None:
    try:
        header = decode(page, segment_id, offset)
    except RecordError:
        return None
    return header if header.record_bytes <= size - offset else None


def _next_candidate(fd: int, offset: int, size: int) -> int:
    """Return the next page that begins like a header or is blank, else the file's end."""
    while offset < size:
        window = os.pread(fd, _WINDOW_BYTES, offset)
        if not window:
            break
        for start in range(0, len(window), PAGE_BYTES):
            page = window[start : start + PAGE_BYTES]
            if page.startswith(MAGIC) or is_blank(page):
                return offset + start
        offset += len(window)
    return size


def _next_data(fd: int, offset: int, size: int) -> int:
    """Return the next page that may not be blank: files are reserved far ahead of the records."""
    try:
        data = os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        return offset
    return max(offset, data // PAGE_BYTES * PAGE_BYTES)
