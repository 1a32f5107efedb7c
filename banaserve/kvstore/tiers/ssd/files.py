"""Files of blocks within a budget of bytes: writing, reading, reuse and deletion, in threads."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np

from banaserve.kvstore.tiers.chains import ChainedBlock
from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.kvstore.tiers.ssd.folder import TEMPORARY, Folder, block_name, describe
from banaserve.kvstore.tiers.ssd.record import (
    PAGE_BYTES,
    RecordHeader,
    checksum,
    encode,
    padded,
    record_bytes,
)

RETRY_S = 5.0
# Maximum number of deletions in a call: the files of one call may exceed the budget for a moment.
MAX_DELETIONS = 16
log = logging.getLogger(__name__)
T = TypeVar("T")


class Workers:
    """Threads that make calls, ``num_threads`` at a time; ``poll`` makes the callbacks.

    ``fd`` is readable when ``poll`` may have something to do.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="ssd")
        self._ended: Mailbox[Callable[[], None]] = Mailbox()
        self.fd = self._ended.fd
        self._num_under_way = 0

    @property
    def is_idle(self) -> bool:
        """Return whether no call is under way."""
        return not self._num_under_way

    def submit(self, call: Callable[[], T], then: Callable[[T | OSError], None]) -> None:
        """Make ``call``; ``then`` gets its result, or the OSError that it raised.

        Any other exception of ``call`` is raised by ``poll``.
        """
        self._threads.submit(call).add_done_callback(
            lambda future: self._ended.put(partial(_tell, then, future))
        )
        self._num_under_way += 1

    def wake(self) -> None:
        """Make ``fd`` readable, so that ``poll`` is called again."""
        self._ended.knock()

    def poll(self) -> None:
        """Make the callbacks of all calls that have ended."""
        self._ended.calm()
        callbacks = self._ended.take()
        self._num_under_way -= len(callbacks)
        for callback in callbacks:
            callback()

    def finish(self) -> None:
        """Wait for all calls, make their callbacks, and stop. Blocks."""
        while not self.is_idle:
            select.select([self.fd], [], [])
            self.poll()
        self._threads.shutdown()
        self._ended.close()


def _tell(then: Callable[[T | OSError], None], future: Future[T]) -> None:
    try:
        result: T | OSError = future.result()
    except OSError as error:
        result = error
    then(result)


class DiskBlock(ChainedBlock):
    """Block with a file, which is the ``sequence``-th of its folder and complete once ``ready``."""

    __slots__ = ("checksum", "num_bytes", "ready", "sequence")

    def __init__(self, key: bytes, parent: bytes | None, num_bytes: int, sequence: int) -> None:
        super().__init__(key, parent)
        self.num_bytes = num_bytes
        self.sequence = sequence
        self.checksum = 0
        self.ready = False

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return record_bytes(self.num_bytes)


class DeadFile(NamedTuple):
    """File whose block is forgotten: to be reused, or deleted."""

    path: str
    num_bytes: int


class BlockFiles:
    """Files of a folder within a budget of bytes.

    A block is written under a temporary name and renamed. Files of forgotten blocks are written
    over if they have the right size: on ext4 that takes half the time of new files, whose space
    must be allocated and the old one's given back.

    Attributes:
        used_bytes: Total size of the files, with those of forgotten blocks.
        problem: Reason why nothing can be stored at present; empty if blocks can be stored.
        direct: True if files are open for direct I/O.
    """

    def __init__(
        self, folder: Folder, workers: Workers, capacity_bytes: int, now: Callable[[], float]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.problem = ""
        self.direct = True
        self._folder = folder
        self._workers = workers
        self._now = now
        self._retry_at_s = 0.0
        self._dead: deque[DeadFile] = deque()
        self._dead_bytes = 0
        self._is_deleting = False
        self._delete_at_s = 0.0

    @property
    def is_tidy(self) -> bool:
        """Return whether no file waits for its deletion."""
        return not self._dead

    @property
    def may_try(self) -> bool:
        """Return whether stores may be tried, after a problem only once the pause is over."""
        return not self.problem or self._now() >= self._retry_at_s

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a file of this size fits, perhaps in place of dead ones."""
        return self.used_bytes - self._dead_bytes + num_bytes <= self.capacity_bytes

    def adopt(self, blocks: Iterable[DiskBlock], dead: Iterable[DeadFile]) -> None:
        """Take over the files of a folder."""
        self.used_bytes += sum(block.file_bytes for block in blocks)
        self._take_in(dead)

    def path(self, block: DiskBlock) -> str:
        """Return the path of the file of a block."""
        return f"{self._folder.path}/{block_name(block.key, block.sequence)}"

    def drop(self, block: DiskBlock) -> None:
        """Leave the file of a forgotten block to be reused or deleted."""
        self._drop(DeadFile(self.path(block), block.file_bytes))

    def write(
        self, block: DiskBlock, source: BlockBytes, then: Callable[[OSError | None], None]
    ) -> None:
        """Write the file of a block, for which there must be room; set the block's checksum.

        ``source`` must not change before ``then`` gets None, or the error: then there is no file.
        """
        path, num_bytes, old = self.path(block), block.file_bytes, None
        if self._dead and self._dead[0].num_bytes == num_bytes:
            old = self._pop_dead().path
        in_the_way: list[DeadFile] = []
        while old is None and self.used_bytes + num_bytes > self.capacity_bytes:
            in_the_way.append(self._pop_dead())
            self.used_bytes -= in_the_way[-1].num_bytes
        if old is None:
            self.used_bytes += num_bytes

        def call() -> tuple[int, bool]:
            _delete(in_the_way)
            digest = checksum(source)
            header = RecordHeader(block.num_bytes, block.sequence, digest, block.key, block.parent)
            return digest, _write_file(path, old, header, source)

        def end(result: tuple[int, bool] | OSError) -> None:
            if isinstance(result, OSError):
                self.used_bytes -= num_bytes
                self._take_in(in_the_way)
                then(result)
                return
            block.checksum, direct = result
            self._note_direct(direct)
            then(None)

        self._workers.submit(call, end)

    def read(
        self, block: DiskBlock, target: BlockBytes, then: Callable[[TierOutcome], None]
    ) -> None:
        """Read the file of a block into ``target`` and verify it; ``then`` gets the outcome."""
        path = self.path(block)

        def end(result: int | OSError | None) -> None:
            gone = isinstance(result, FileNotFoundError)
            if isinstance(result, OSError) and not gone:
                then(TierOutcome.FAILED)
            else:
                then(TierOutcome.DONE if result == block.checksum else TierOutcome.CORRUPT)

        self._workers.submit(lambda: read_file(path, target), end)

    def tidy(self) -> None:
        """Delete files of forgotten blocks, a few at a time."""
        if self._is_deleting or not self._dead or self._now() < self._delete_at_s:
            return
        self._is_deleting = True
        files = [self._pop_dead() for _ in range(min(MAX_DELETIONS, len(self._dead)))]
        # At once, so that no more blocks are evicted meanwhile for the same room.
        self.used_bytes -= sum(file.num_bytes for file in files)

        def end(error: OSError | None) -> None:
            self._is_deleting = False
            if error is not None:
                self._take_in(files)
                self._delete_at_s = self._now() + RETRY_S
                self.report(error)

        self._workers.submit(lambda: _delete(files), end)

    def report(self, error: OSError) -> None:
        """Accept no stores for a while, and log the reason once."""
        self._retry_at_s = self._now() + RETRY_S
        problem = describe(error, self._folder.path)
        if problem != self.problem:
            self.problem = problem
            log.error("nothing more is stored for now: %s", problem)

    def clear_problem(self) -> None:
        """Accept stores again, because one has succeeded."""
        if self.problem:
            self.problem = ""
            log.info("blocks are stored again in %s", self._folder.path)

    def _take_in(self, dead: Iterable[DeadFile]) -> None:
        for file in dead:
            self.used_bytes += file.num_bytes
            self._drop(file)

    def _drop(self, file: DeadFile) -> None:
        self._dead.append(file)
        self._dead_bytes += file.num_bytes

    def _pop_dead(self) -> DeadFile:
        file = self._dead.popleft()
        self._dead_bytes -= file.num_bytes
        return file

    def _note_direct(self, direct: bool) -> None:
        """Log once if the file system refuses direct I/O."""
        if self.direct and not direct:
            log.warning("%s takes no direct I/O: blocks go through memory", self._folder.path)
        self.direct = direct


def aligned_bytes(num_bytes: int) -> BlockBytes:
    """Return zeroed memory that starts at a page boundary, ``[num_bytes]``."""
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


def _write_file(path: str, old: str | None, header: RecordHeader, source: BlockBytes) -> bool:
    """Write a file, over the file ``old`` if given; return whether direct I/O was used.

    Raises:
        OSError: The file cannot be written; neither it nor ``old`` is left.
    """
    temporary = path + TEMPORARY
    try:
        if old is not None:
            os.rename(old, temporary)
        fd, direct = _open_direct(temporary, os.O_RDWR | os.O_CREAT)
        try:
            if old is None:
                _reserve(fd, record_bytes(header.num_bytes))
            page = aligned_bytes(PAGE_BYTES)
            page[:] = np.frombuffer(encode(header), dtype=np.uint8)
            parts, odd = _parts(source)
            odd[:] = source[source.nbytes - odd.nbytes :]
            if os.pwritev(fd, [page.data, *parts], 0) != record_bytes(header.num_bytes):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        os.rename(temporary, path)
    except OSError:
        for left in (temporary, *([old] if old else [])):
            with suppress(OSError):
                os.unlink(left)
        raise
    return direct


def read_file(path: str, target: BlockBytes) -> int | None:
    """Read a block from a file; return the checksum, or None if the disk does not yield its bytes.

    Raises:
        OSError: The file cannot be opened.
    """
    fd, _ = _open_direct(path, os.O_RDONLY)
    try:
        return read_open_file(fd, target)
    finally:
        os.close(fd)


def read_open_file(fd: int, target: BlockBytes) -> int | None:
    """Read a block as ``read_file`` does, from a file that is open."""
    parts, odd = _parts(target)
    try:
        num_read = os.preadv(fd, parts, PAGE_BYTES)
    except OSError:  # a bad sector: further tries would fail too
        return None
    if num_read != padded(target.nbytes):
        return None
    target[target.nbytes - odd.nbytes :] = odd
    return checksum(target)


def _parts(block: BlockBytes) -> tuple[list[memoryview], BlockBytes]:
    """Return a block's pages to move, and the place of its last bytes in a separate last page.

    There is no such page, and no last bytes, if the block has whole pages only.
    """
    num_odd = block.nbytes % PAGE_BYTES
    parts = [block[: block.nbytes - num_odd].data] if block.nbytes > num_odd else []
    if not num_odd:
        return parts, block[:0]
    page = aligned_bytes(PAGE_BYTES)
    return [*parts, page.data], page[:num_odd]


def _open_direct(path: str, flags: int) -> tuple[int, bool]:
    """Open a file that is no link; return its descriptor, and whether it is open for direct I/O."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False


def _reserve(fd: int, num_bytes: int) -> None:
    """Reserve disk space, so that a full disk is noticed before a block is written."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def _delete(files: list[DeadFile]) -> None:
    """Delete files and remove them from the list; an OSError leaves the others in it."""
    while files:
        with suppress(FileNotFoundError):
            os.unlink(files[-1].path)
        files.pop()
