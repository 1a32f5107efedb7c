"""Contents of a tier's folder: recovery of the index from files' headers, and verification."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.files import DeadFile, DiskBlock, aligned_bytes, read_open_file
from banaserve.kvstore.tiers.ssd.folder import (
    BlockFile,
    Folder,
    block_files,
    block_name,
    check_format,
    describe,
    is_in_use,
    read_cleared,
)
from banaserve.kvstore.tiers.ssd.record import (
    PAGE_BYTES,
    RecordError,
    RecordHeader,
    decode,
    record_bytes,
)

NAMESPACE_BYTES = 16
MAX_PROBLEM_LINES = 100
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
    valid = _newest_files(files, cleared)
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


def _newest_files(files: Iterable[BlockFile], cleared_sequence: int) -> dict[bytes, BlockFile]:
    """Return the newest valid file of each key; unfinished and cleared files are left out."""
    newest: dict[bytes, BlockFile] = {}
    for file in files:
        if file.key and file.sequence > cleared_sequence:
            known = newest.get(file.key)
            if known is None or file.sequence > known.sequence:
                newest[file.key] = file
    return newest


def _open_to_read(path: str) -> int:
    """Open a file, safely even if another kind of file was put in its place."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _read_header(fd: int, file: BlockFile) -> RecordHeader | None:
    """Return the header of an open file; None if it cannot be read, or is not the file's."""
    try:
        header = decode(os.pread(fd, PAGE_BYTES, 0))
    except (OSError, RecordError):
        return None
    if not file.path.endswith("/" + block_name(header.key, header.sequence)):
        return None
    return header if os.fstat(fd).st_size == record_bytes(header.num_bytes) else None


def _headers(
    files: Sequence[BlockFile], now: Callable[[], float]
) -> Iterator[tuple[BlockFile, RecordHeader | None]]:
    """Yield each file with its header, as ``_read_header`` returns it; say how far that is."""
    told_at_s = now()
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="ssd-recovery") as threads:
        for start in range(0, len(files), _BATCH_FILES):
            if now() - told_at_s >= _SILENT_S:
                told_at_s = now()
                log.info("reading the SSD tier's index: %d of %d files", start, len(files))
            batch = files[start : start + _BATCH_FILES]
            yield from zip(batch, threads.map(_read_and_close, batch), strict=True)


def _read_and_close(file: BlockFile) -> RecordHeader | None:
    fd = _open_to_read(file.path)
    try:
        # Reading ahead would fetch the blocks as well.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return _read_header(fd, file)
    finally:
        os.close(fd)


@dataclass
class CheckReport:
    """Contents of a folder.

    Attributes:
        in_use: True if a store has the folder open: files may be incomplete or vanish.
        num_files: Number of files, unfinished ones included.
        num_bytes: Total size of the files.
        num_ok: Number of blocks that are good and valid.
        num_dead: Number of good files that are no longer valid: superseded, or cleared.
        num_torn: Number of files whose writing was cut short; the next store deletes them.
        num_corrupt: Number of files with wrong bytes.
        blocks_by_namespace: Number of blocks that are good and valid, by namespace in hex.
        problems: Lines for the torn and corrupt files, one for each, at most a hundred.
    """

    in_use: bool = False
    num_files: int = 0
    num_bytes: int = 0
    num_ok: int = 0
    num_dead: int = 0
    num_torn: int = 0
    num_corrupt: int = 0
    blocks_by_namespace: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Return whether nothing is torn or corrupt."""
        return not self.num_torn and not self.num_corrupt


def check_folder(path: Path) -> CheckReport:
    """Verify every file of a tier's folder, header and bytes. Changes nothing.

    It works while a store has the folder open; then blocks that the store is just writing look
    torn, and ``in_use`` is True.

    Raises:
        UserError: There is no tier in the folder, it is of another version, or it cannot be read.
    """
    try:
        check_format(path)
        return _check(path)
    except FileNotFoundError as error:
        raise UserError(f"{path} is no SSD tier's folder: name the one given to --ssd") from error
    except OSError as error:
        raise UserError(describe(error, path)) from error


def _check(path: Path) -> CheckReport:
    report = CheckReport(in_use=is_in_use(path))
    good: list[BlockFile] = []
    for file in sorted(block_files(path)):
        try:
            fd = _open_to_read(file.path)
        except FileNotFoundError:
            # A store that has the folder open may have deleted it.
            continue
        try:
            report.num_files += 1
            report.num_bytes += os.fstat(fd).st_size
            if not file.key:
                _note(report, "torn", file)
            elif _is_good(fd, file):
                good.append(file)
            else:
                _note(report, "corrupt", file)
        finally:
            os.close(fd)
    valid = _newest_files(good, read_cleared(path))
    report.num_ok, report.num_dead = len(valid), len(good) - len(valid)
    names = Counter(key[:NAMESPACE_BYTES].hex() for key in valid)
    report.blocks_by_namespace = dict(sorted(names.items()))
    return report


def _is_good(fd: int, file: BlockFile) -> bool:
    header = _read_header(fd, file)
    if header is None:
        return False
    # Not opened again by its path: a store that evicts may have deleted or renamed the file.
    return read_open_file(fd, aligned_bytes(header.num_bytes)) == header.checksum


def _note(report: CheckReport, word: str, file: BlockFile) -> None:
    report.num_torn += word == "torn"
    report.num_corrupt += word == "corrupt"
    if len(report.problems) < MAX_PROBLEM_LINES:
        report.problems.append(f"{word}: {os.path.basename(file.path)}")
