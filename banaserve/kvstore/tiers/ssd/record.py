"""Record of the log: a header page, then a block's bytes padded to whole pages.

The header contains its own position, so that bytes of a block that look like a header, or a record
at a wrong position, are never taken for a record. A page that ``encode`` did not write is refused,
whatever its content.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import xxhash

from banaserve.base.errors import BanaServeError

PAGE_BYTES = 4096
MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 80
MAX_BLOCK_BYTES = 2**30
# No log reaches this number; a damaged log must not make the next number overflow its field.
MAX_SEQUENCE = 2**62
FORMAT_VERSION = 1
MAGIC = b"\x93BANASSD"

# magic, version, kind, segment, offset, payload bytes, sequence, age, payload checksum, lengths of
# the key and of the parent's key
_FIELDS = struct.Struct("<8sIIQQQQQQHH")
_CHECKSUM = struct.Struct("<Q")
_KEY_START = _FIELDS.size
_PARENT_START = _KEY_START + MAX_KEY_BYTES
_CHECKSUM_START = PAGE_BYTES - _CHECKSUM.size
_ZERO_PAGE = bytes(PAGE_BYTES)


class RecordError(BanaServeError):
    """Error for a page that is not a header and is to be skipped."""


class Kind(IntEnum):
    """Kind of the bytes after a header."""

    BLOCK = 1
    FILLER = 2  # no content: covers damaged or unused bytes


class RecordHeader(NamedTuple):
    """First page of a record.

    Attributes:
        kind: Kind of the bytes after the page.
        segment_id: Id of the segment file that holds the record.
        offset: Offset of this page in that file.
        num_bytes: Number of bytes after the page, without padding.
        sequence: Number of the record, unique for each record ever written; larger for newer ones.
        age: Sequence of the block's first record; a copy keeps it.
        checksum: xxh3 of the ``num_bytes``; 0 for a filler.
        key: Key of the block; empty for a filler.
        parent: Key of the block before it in its chain; None for the first.
    """

    kind: Kind
    segment_id: int
    offset: int
    num_bytes: int
    sequence: int
    age: int
    checksum: int
    key: bytes
    parent: bytes | None

    @property
    def record_bytes(self) -> int:
        """Size of the record on disk, including this page and padding."""
        return record_bytes(self.num_bytes)


def padded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(num_bytes: int) -> int:
    """Return the size on disk of the record of a block of ``num_bytes``."""
    return PAGE_BYTES + padded(num_bytes)


def checksum(data: Any) -> int:
    """Return the xxh3 of a buffer. Releases the GIL for buffers over 64 KiB."""
    # One-shot functions of xxhash hold the GIL in some versions; ``update`` does in none.
    digest = xxhash.xxh3_64()
    digest.update(data)
    return int(digest.intdigest())


def encode(header: RecordHeader) -> bytes:
    """Encode a header as a page."""
    parent = header.parent or b""
    fields = _FIELDS.pack(
        MAGIC,
        FORMAT_VERSION,
        header.kind,
        header.segment_id,
        header.offset,
        header.num_bytes,
        header.sequence,
        header.age,
        header.checksum,
        len(header.key),
        len(parent),
    )
    names = header.key.ljust(MAX_KEY_BYTES, b"\0") + parent
    body = (fields + names).ljust(_CHECKSUM_START, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def decode(page: bytes, segment_id: int, offset: int) -> RecordHeader:
    """Decode the header in a page read from ``offset`` of a segment.

    Raises:
        RecordError: The page holds no header, one of another version or position, or a damaged one.
    """
    if len(page) != PAGE_BYTES or not page.startswith(MAGIC):
        raise RecordError("no header")
    body, (stored,) = page[:_CHECKSUM_START], _CHECKSUM.unpack_from(page, _CHECKSUM_START)
    if checksum(body) != stored:
        raise RecordError("the header's checksum is wrong")
    header = _unpack(page)
    if (header.segment_id, header.offset) != (segment_id, offset):
        raise RecordError("the header belongs elsewhere")
    if encode(header) != page:
        raise RecordError("the header holds what no header holds")
    return header


def is_blank(page: bytes) -> bool:
    """Return whether nothing was ever written to a page."""
    return page == _ZERO_PAGE


def _unpack(page: bytes) -> RecordHeader:
    fields = _FIELDS.unpack_from(page)
    _, version, kind, segment_id, offset, num_bytes, sequence, age, digest, *lengths = fields
    num_key_bytes, num_parent_bytes = lengths
    if version != FORMAT_VERSION:
        raise RecordError(f"the header is of version {version}")
    if kind not in (Kind.BLOCK, Kind.FILLER):
        raise RecordError(f"records of kind {kind} are unknown")
    if max(sequence, age) > MAX_SEQUENCE:
        raise RecordError("the header's sequence is impossible")
    _check_sizes(Kind(kind), num_bytes, num_key_bytes, num_parent_bytes)
    key = page[_KEY_START : _KEY_START + num_key_bytes]
    parent = page[_PARENT_START : _PARENT_START + num_parent_bytes] or None
    return RecordHeader(
        Kind(kind), segment_id, offset, num_bytes, sequence, age, digest, key, parent
    )


def _check_sizes(kind: Kind, num_bytes: int, num_key_bytes: int, num_parent_bytes: int) -> None:
    if kind is Kind.FILLER:
        if num_key_bytes or num_parent_bytes:
            raise RecordError("a filler has no key")
        return
    if not 0 < num_bytes <= MAX_BLOCK_BYTES:
        raise RecordError(f"no block has {num_bytes} bytes")
    if not MIN_KEY_BYTES <= num_key_bytes <= MAX_KEY_BYTES:
        raise RecordError(f"no key has {num_key_bytes} bytes")
    if num_parent_bytes and not MIN_KEY_BYTES <= num_parent_bytes <= MAX_KEY_BYTES:
        raise RecordError(f"no parent's key has {num_parent_bytes} bytes")
