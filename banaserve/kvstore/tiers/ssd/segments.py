"""Segment files: creation, reservation and removal. These calls block; a worker makes them."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from banaserve.kvstore.tiers.chains import ChainedBlock
from banaserve.kvstore.tiers.ssd.device import aligned_bytes
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES, Kind, RecordHeader, encode, record_bytes

_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class LogBlock(ChainedBlock):
    """Block with the position of its record.

    Attributes:
        ready: False while the record is being written.
        is_copied: True if one of the block's users is a copy to another segment.
    """

    __slots__ = ("age", "checksum", "is_copied", "num_bytes", "offset", "ready", "segment")

    def __init__(
        self, key: bytes, parent: bytes | None, num_bytes: int, segment: Segment, offset: int
    ) -> None:
        super().__init__(key, parent)
        self.num_bytes = num_bytes
        self.segment = segment
        self.offset = offset
        self.checksum = 0
        self.age = 0
        self.ready = False
        self.is_copied = False

    @property
    def record_bytes(self) -> int:
        """Size of the record on disk."""
        return record_bytes(self.num_bytes)

    @property
    def is_busy(self) -> bool:
        """Return whether the block is being read or written, other than by a copy."""
        return self.num_users > self.is_copied


class Segment:
    """File of the log.

    Attributes:
        size_bytes: Size of the file: reserved while records are appended, ``end`` after that.
        end: Offset of the next record.
        live_bytes: Total size of the records of ``blocks``.
        num_users: Number of transfers and other operations under way that need the file.
    """

    __slots__ = ("blocks", "end", "fd", "id", "is_open", "live_bytes", "num_users", "size_bytes")

    def __init__(self, segment_id: int, fd: int, size_bytes: int, end: int = 0) -> None:
        self.id = segment_id
        self.fd = fd
        self.size_bytes = size_bytes
        self.end = end
        self.live_bytes = 0
        self.num_users = 0
        self.is_open = True
        self.blocks: dict[bytes, LogBlock] = {}

    @property
    def room_bytes(self) -> int:
        """Number of bytes left for further records."""
        return self.size_bytes - self.end

    def add(self, block: LogBlock) -> None:
        """Add a block whose record is in this segment."""
        self.blocks[block.key] = block
        self.live_bytes += block.record_bytes

    def remove(self, block: LogBlock) -> None:
        """Remove a block: its record is dead."""
        del self.blocks[block.key]
        self.live_bytes -= block.record_bytes


class Lane:
    """Segment to which one kind of writer appends, and the next one.

    Args:
        reserve_bytes: Number of bytes of the budget that must stay free when a segment is created
            for this writer.
    """

    def __init__(self, reserve_bytes: int) -> None:
        self.reserve_bytes = reserve_bytes
        self.current: Segment | None = None
        self.next: Segment | None = None
        self.is_creating = False
        self.is_starved = False


def open_direct(path: Path, flags: int = 0) -> tuple[int, bool]:
    """Open a segment; return its file descriptor, and whether it is open for direct I/O.

    Raises:
        OSError: The file cannot be opened.
    """
    try:
        return os.open(path, _FLAGS | flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Without O_EXCL: the failed call may have created the file.
        return os.open(path, _FLAGS | flags & ~os.O_EXCL, 0o600), False


def create_segment(path: Path, size_bytes: int) -> tuple[int, bool]:
    """Create a file with all its bytes reserved; return the same as ``open_direct``.

    Raises:
        OSError: There is no room, for example; then no file is left behind.
    """
    fd, direct = open_direct(path, os.O_CREAT | os.O_EXCL)
    try:
        reserve(fd, size_bytes)
    except OSError:
        os.close(fd)
        path.unlink()
        raise
    return fd, direct


def reserve(fd: int, size_bytes: int) -> None:
    """Reserve disk space for a file of this size, so that writes cannot fail for lack of room.

    Raises:
        OSError: There is no room.
    """
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size_bytes)


def remove_segment(path: Path, fd: int) -> None:
    """Close and delete a file.

    Raises:
        OSError: The file cannot be deleted; its descriptor is closed.
    """
    os.close(fd)
    with suppress(FileNotFoundError):
        path.unlink()


def write_filler(fd: int, segment_id: int, offset: int, num_bytes: int, sequence: int) -> None:
    """Cover ``num_bytes`` (whole pages) with a filler, so that scans skip the bytes under it.

    Raises:
        OSError: The filler cannot be written.
    """
    page = aligned_bytes(PAGE_BYTES)
    header = RecordHeader(
        Kind.FILLER, segment_id, offset, num_bytes - PAGE_BYTES, sequence, 0, 0, b"", None
    )
    page[:] = memoryview(encode(header))
    if os.pwritev(fd, [page.data], offset) != PAGE_BYTES:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
