"""Recovery of a tier's index from the headers of its files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import xxhash

from banaserve.kvstore.tiers.ssd.files import DeadFile, DiskBlock
from banaserve.kvstore.tiers.ssd.folder import (
    BlockFile,
    Folder,
    block_files,
    block_name,
    read_cleared,
)
from banaserve.kvstore.tiers.ssd.record import (
    PAGE_BYTES,
    RecordError,
    RecordHeader,
    decode,
    record_bytes,
)

_WINDOW_BYTES = 2**20
_SILENT_S = 2.0
# A header is read in a fraction of the time that a disk takes to answer.
_NUM_THREADS = 16
_BATCH_FILES = 1024
log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """Contents of a folder.

    Attributes:
        blocks: Blocks, oldest first.
        dead: Files of blocks that are cleared or stored again.
        last_sequence: Largest sequence used so far.
        num_corrupt: Number of damaged files, each now deleted.
    """

    blocks: list[DiskBlock] = field(default_factory=list)
    dead: list[DeadFile] = field(default_factory=list)
    last_sequence: int = 0
    num_corrupt: int = 0


def recover(folder: Folder, now: Callable[[], float] = time.monotonic) -> Recovered:
    """Read the header of every file; delete damaged and unfinished files.

    Raises:
        OSError: A file cannot be read or deleted.
    """
    files = list(block_files(folder.path))
    cleared = read_cleared(folder.path)
    recovered = Recovered(last_sequence=max([cleared, *(file.sequence for file in files)]))
    valid = newest_files(files, cleared)
    for file in files:
        if not file.key:
            os.unlink(file.path)
        elif valid.get(file.key) is not file:
            num_bytes = os.stat(file.path, follow_symlinks=False).st_size
            recovered.dead.append(DeadFile(file.path, num_bytes))
    for file, header in _headers(sorted(valid.values(), key=lambda file: file.sequence), now):
        if header is None:
            recovered.num_corrupt += 1
            os.unlink(file.path)
        else:
            block = DiskBlock(file.key, header.parent, header.num_bytes, file.sequence)
            block.checksum, block.ready = header.checksum, True
            recovered.blocks.append(block)
    if recovered.num_corrupt:
        log.warning(
            "%d damaged files in %s were deleted; their blocks are lost",
            recovered.num_corrupt,
            folder.path,
        )
    return recovered


def newest_files(files: Iterable[BlockFile], cleared_sequence: int) -> dict[bytes, BlockFile]:
    """Return the newest valid file of each key; unfinished and cleared files are left out."""
    newest: dict[bytes, BlockFile] = {}
    for file in files:
        if file.key and file.sequence > cleared_sequence:
            known = newest.get(file.key)
            if known is None or file.sequence > known.sequence:
                newest[file.key] = file
    return newest


def open_to_read(path: str) -> int:
    """Open a file, safely even if another kind of file was put in its place.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def read_header(fd: int, file: BlockFile) -> RecordHeader | None:
    """Return the header of an open file; None if it does not match the file's path and size.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        header = decode(os.pread(fd, PAGE_BYTES, 0))
    except RecordError:
        return None
    if not file.path.endswith("/" + block_name(header.key, header.sequence)):
        return None
    return header if os.fstat(fd).st_size == record_bytes(header.num_bytes) else None


def payload_is_good(fd: int, header: RecordHeader) -> bool:
    """Return whether a block's bytes match its checksum. Reads them a MiB at a time.

    Raises:
        OSError: The file cannot be read.
    """
    digest = xxhash.xxh3_64()
    buffer = bytearray(min(header.num_bytes, _WINDOW_BYTES))
    position, end = PAGE_BYTES, PAGE_BYTES + header.num_bytes
    while position < end:
        window = memoryview(buffer)[: end - position]
        num_read = os.preadv(fd, [window], position)
        if not num_read:
            return False
        digest.update(window[:num_read])
        position += num_read
    return bool(digest.intdigest() == header.checksum)


def _headers(
    files: Sequence[BlockFile], now: Callable[[], float]
) -> Iterator[tuple[BlockFile, RecordHeader | None]]:
    """Yield each file with its header, as ``read_header`` returns it; say how far that is."""
    told_at_s = now()
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ssd-recovery") as threads:
        for start in range(0, len(files), _BATCH_FILES):
            if now() - told_at_s >= _SILENT_S:
                told_at_s = now()
                log.info("reading the SSD tier's index: %d of %d files", start, len(files))
            batch = files[start : start + _BATCH_FILES]
            yield from zip(batch, threads.map(_read_and_close, batch), strict=True)


def _read_and_close(file: BlockFile) -> RecordHeader | None:
    fd = open_to_read(file.path)
    try:
        # Reading ahead would fetch the blocks as well.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return read_header(fd, file)
    finally:
        os.close(fd)
