"""File of a block: a header page, then the block's bytes padded to whole pages.

The file's name repeats the key and the sequence of the header. A page that ``encode`` did not write
is refused, whatever its content.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import xxhash

from banaserve.base.errors import BanaServeError

PAGE_BYTES = 4096
MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 80
MAX_BLOCK_BYTES = 2**30
# No tier reaches this number; a damaged file must not make the next number overflow its field.
MAX_SEQUENCE = 2**62
FORMAT_VERSION = 2
MAGIC = b"\x93BANASSD"

# magic, version, payload bytes, sequence, payload checksum, lengths of the key and of the parent's
# key
_FIELDS = struct.Struct("<8sIQQQHH")
_CHECKSUM = struct.Struct("<Q")
_KEY_START = _FIELDS.size
_PARENT_START = _KEY_START + MAX_KEY_BYTES
_CHECKSUM_START = PAGE_BYTES - _CHECKSUM.size


class RecordError(BanaServeError):
    """Error for a page that is not a header."""


class RecordHeader(NamedTuple):
    """First page of a block's file.

    Attributes:
        num_bytes: Number of bytes of the block, without padding.
        sequence: Number of the store of this block, unique in the folder; larger for newer ones.
        checksum: xxh3 of the ``num_bytes``.
        key: Key of the block.
        parent: Key of the block before it in its chain; None for the first.
    """

    num_bytes: int
    sequence: int
    checksum: int
    key: bytes
    parent: bytes | None


def padded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def record_bytes(num_bytes: int) -> int:
    """Return the size of the file of a block of ``num_bytes``."""
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
        header.num_bytes,
        header.sequence,
        header.checksum,
        len(header.key),
        len(parent),
    )
    names = header.key.ljust(MAX_KEY_BYTES, b"\0") + parent
    body = (fields + names).ljust(_CHECKSUM_START, b"\0")
    return body + _CHECKSUM.pack(checksum(body))


def decode(page: bytes) -> RecordHeader:
    """Decode the header in a page.

    Raises:
        RecordError: The page holds no header, one of another version, or a damaged one.
    """
    if len(page) != PAGE_BYTES or not page.startswith(MAGIC):
        raise RecordError("no header")
    body, (stored,) = page[:_CHECKSUM_START], _CHECKSUM.unpack_from(page, _CHECKSUM_START)
    if checksum(body) != stored:
        raise RecordError("the header's checksum is wrong")
    header = _unpack(page)
    if encode(header) != page:
        raise RecordError("the header holds what no header holds")
    return header


def _unpack(page: bytes) -> RecordHeader:
    _, version, num_bytes, sequence, digest, *lengths = _FIELDS.unpack_from(page)
    num_key_bytes, num_parent_bytes = lengths
    if version != FORMAT_VERSION:
        raise RecordError(f"the header is of version {version}")
    if sequence > MAX_SEQUENCE:
        raise RecordError("the header's sequence is impossible")
    if not 0 < num_bytes <= MAX_BLOCK_BYTES:
        raise RecordError(f"no block has {num_bytes} bytes")
    if not MIN_KEY_BYTES <= num_key_bytes <= MAX_KEY_BYTES:
        raise RecordError(f"no key has {num_key_bytes} bytes")
    if num_parent_bytes and not MIN_KEY_BYTES <= num_parent_bytes <= MAX_KEY_BYTES:
        raise RecordError(f"no parent's key has {num_parent_bytes} bytes")
    key = page[_KEY_START : _KEY_START + num_key_bytes]
    parent = page[_PARENT_START : _PARENT_START + num_parent_bytes] or None
    return RecordHeader(num_bytes, sequence, digest, key, parent)
