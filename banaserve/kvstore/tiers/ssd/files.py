"""Files of blocks within a budget of bytes: creation, reuse and deletion."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from banaserve.kvstore.tiers.chains import ChainedBlock
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.tiers.ssd.device import BlockDevice
from banaserve.kvstore.tiers.ssd.folder import TEMPORARY, Folder, describe
from banaserve.kvstore.tiers.ssd.record import checksum, record_bytes

RETRY_S = 5.0
# Deletions given to the worker at a time: stores wait behind them.
MAX_DELETIONS = 16
log = logging.getLogger(__name__)


class DiskBlock(ChainedBlock):
    """Block with a file.

    Attributes:
        sequence: Number of the store of the block.
        ready: False while the file is being written.
    """

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

    Args:
        folder: Folder of the files.
        device: Device that makes the slow calls.
        capacity_bytes: Budget: maximum total size of the files.
        now: Monotonic clock, in seconds.

    Attributes:
        used_bytes: Total size of the files, with those of forgotten blocks.
        problem: Reason why nothing can be stored at present; empty if blocks can be stored.
        direct: True if files are open for direct I/O.
    """

    def __init__(
        self, folder: Folder, device: BlockDevice, capacity_bytes: int, now: Callable[[], float]
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.problem = ""
        self.direct = True
        self._folder = folder
        self._device = device
        self._now = now
        self._retry_at_s = 0.0
        self._dead: deque[DeadFile] = deque()
        self._dead_bytes = 0

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
        for file in dead:
            self.used_bytes += file.num_bytes
            self._drop(file)

    def path(self, block: DiskBlock) -> str:
        """Return the path of the file of a block."""
        return self._folder.block_path(block.key, block.sequence)

    def drop(self, block: DiskBlock) -> None:
        """Leave the file of a forgotten block to be reused or deleted."""
        self._drop(DeadFile(self.path(block), block.file_bytes))

    def begin_file(
        self, block: DiskBlock, source: BlockBytes, then: Callable[[int | OSError], None]
    ) -> None:
        """Make a file to write, under the temporary name of the block's; there must be room.

        Args:
            block: Block of the file; gets the checksum.
            source: Bytes of the block.
            then: Function that gets the file's descriptor, or the error.
        """
        path, num_bytes, old = self.path(block) + TEMPORARY, block.file_bytes, None
        if self._dead and self._dead[0].num_bytes == num_bytes:
            old = self._pop_dead().path
        while old is None and self.used_bytes + num_bytes > self.capacity_bytes:
            self._delete(self._pop_dead())
        if old is None:
            self.used_bytes += num_bytes

        def call() -> tuple[int, tuple[int, bool]]:
            return checksum(source), _open_new(path, num_bytes, old)

        def end(result: tuple[int, tuple[int, bool]] | OSError) -> None:
            if isinstance(result, OSError):
                self.used_bytes -= num_bytes
                then(result)
                return
            block.checksum, (fd, direct) = result
            self.note_direct(direct)
            then(fd)

        self._device.stores.submit(call, end)

    def publish(self, block: DiskBlock, fd: int, then: Callable[[OSError | None], None]) -> None:
        """Close a file that ``begin_file`` made, and give it its name; ``then`` gets the error."""
        path = self.path(block)
        temporary = path + TEMPORARY

        def call() -> None:
            os.close(fd)
            os.rename(temporary, path)

        def end(error: OSError | None) -> None:
            if error is not None:
                self._delete(DeadFile(temporary, block.file_bytes))
            then(error)

        self._device.stores.submit(call, end)

    def abandon(self, block: DiskBlock, fd: int) -> None:
        """Close and delete a file that ``begin_file`` made."""
        os.close(fd)
        self._delete(DeadFile(self.path(block) + TEMPORARY, block.file_bytes))

    def tidy(self) -> None:
        """Delete files of forgotten blocks, a few at a time."""
        while self._dead and self._device.stores.num_under_way < MAX_DELETIONS:
            self._delete(self._pop_dead())

    def note_direct(self, direct: bool) -> None:
        """Log once if the file system refuses direct I/O."""
        if self.direct and not direct:
            log.warning("%s takes no direct I/O: blocks go through memory", self._folder.path)
        self.direct = direct

    def report(self, error: OSError) -> None:
        """Accept no stores for a while, and log the reason once."""
        self._retry_at_s = self._now() + RETRY_S
        problem = describe(error, self._folder.path)
        if problem != self.problem:
            self.problem = problem
            log.error("nothing more is stored for now: %s", problem)

    def recover(self) -> None:
        """Clear the problem, because a store has succeeded."""
        if self.problem:
            self.problem = ""
            log.info("blocks are stored again in %s", self._folder.path)

    def _drop(self, file: DeadFile) -> None:
        self._dead.append(file)
        self._dead_bytes += file.num_bytes

    def _pop_dead(self) -> DeadFile:
        file = self._dead.popleft()
        self._dead_bytes -= file.num_bytes
        return file

    def _delete(self, file: DeadFile) -> None:
        # The worker makes its calls in order: a file that is created after this finds the room.
        self.used_bytes -= file.num_bytes

        def call() -> None:
            with suppress(FileNotFoundError):
                os.unlink(file.path)

        def end(result: OSError | None) -> None:
            if result is not None:
                self.used_bytes += file.num_bytes
                self.report(result)

        self._device.stores.submit(call, end)


def open_direct(path: str, flags: int) -> tuple[int, bool]:
    """Open a file; return its descriptor, and whether it is open for direct I/O.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Without O_EXCL: the failed call may have created the file.
        return os.open(path, flags & ~os.O_EXCL, 0o600), False


def _open_new(path: str, num_bytes: int, old: str | None) -> tuple[int, bool]:
    """Make a file of this size, from the file ``old`` if given; same result as ``open_direct``."""
    if old is not None:
        try:
            os.rename(old, path)
            return open_direct(path, os.O_RDWR)
        except OSError:
            _remove(old, path)
            raise
    fd, direct = open_direct(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        _reserve(fd, num_bytes)
    except OSError:
        os.close(fd)
        _remove(path)
        raise
    return fd, direct


def _reserve(fd: int, num_bytes: int) -> None:
    """Reserve disk space, so that a disk that is full is noticed before a block is written."""
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, num_bytes)


def _remove(*paths: str) -> None:
    for path in paths:
        with suppress(OSError):
            os.unlink(path)
