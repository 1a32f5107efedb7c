"""Memory file that two processes map, with the epoch under which it may be read and written.

The first page holds the epoch; the region's bytes follow. A peer takes a shared file lock for each
slice and reads the epoch under the lock; the owner writes the epoch and then waits for the
exclusive lock. Afterwards no copy of an old epoch is under way, and the kernel releases the lock of
a process that dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from banaserve.base.platform.linux import MADV_REMOVE, SEALS, madvise, populate
from banaserve.transport.errors import RefusedError, StaleEpochError, TransferTimeoutError
from banaserve.transport.memory import PAGE_BYTES, CopyRuns, Memory, Plan, copy_runs, whole_pages

_CLOSED = 2**64 - 1
_DRAIN_POLL_S = 0.0005


class SharedFile:
    """Mapping of the file in one process.

    Args:
        fd: File descriptor, closed by ``close``. Its open file description must not be shared with
            another process, because locks belong to the open file description.
        num_bytes: Size of the region.
        copy: Function that copies runs between this process and the region.

    Raises:
        RefusedError: The file is not a sealed memory file of the right size.
    """

    def __init__(self, fd: int, num_bytes: int, copy: CopyRuns = copy_runs) -> None:
        self._fd = fd
        self._copy_runs = copy
        self._locks = threading.Lock()
        size_bytes = file_bytes(num_bytes)
        if os.fstat(fd).st_size != size_bytes or not _is_sealed(fd):
            raise RefusedError("what the peer offers is no sealed memory file of the right size")
        mapping = np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8)
        self._epoch = mapping[:8].view(np.uint64)
        data = mapping[PAGE_BYTES : PAGE_BYTES + num_bytes]
        self.memory = Memory.of(data)

    def reopen(self) -> int:
        """Return a new file descriptor with separate locks; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)

    @contextmanager
    def use(self, epoch: int) -> Iterator[None]:
        """Keep the owner's ``advance`` from returning while bytes of a peer's transfer move.

        Raises:
            StaleEpochError: The region has another epoch.
            RefusedError: The region is closed.
        """
        with self._locks:
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            try:
                now = int(self._epoch[0])
                if now == _CLOSED:
                    raise RefusedError("the region is closed")
                if now != epoch:
                    raise StaleEpochError(f"the region is at epoch {now}, not {epoch}")
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def advance(self, epoch: int, timeout_s: float) -> None:
        """Set the epoch and wait until no bytes move under another epoch.

        Raises:
            TransferTimeoutError: Bytes still move.
        """
        with self._locks:
            self._epoch[0] = epoch
            self._drain(timeout_s)

    def retire(self, timeout_s: float) -> None:
        """Refuse all transfers from now on and free the pages.

        Raises:
            TransferTimeoutError: Bytes still move; the pages were freed.
        """
        try:
            self.advance(_CLOSED, timeout_s)
        finally:
            self.release(0, self.memory.num_bytes)

    def release(self, first_byte: int, num_bytes: int) -> int:
        """Free the whole pages of a range by punching a hole; return its length in bytes."""
        first, length = whole_pages(first_byte, num_bytes)
        if length:
            madvise(self.memory.address + first, length, MADV_REMOVE)
        return length

    def populate(self, first_byte: int, num_bytes: int) -> None:
        """Allocate the pages of a range and map them, without changing their bytes."""
        first = self.memory.address + first_byte // PAGE_BYTES * PAGE_BYTES
        end = self.memory.address + first_byte + num_bytes
        populate(first, end - first)  # if the kernel cannot, the copies cause page faults

    def copy(self, part: Plan) -> None:
        """Copy the runs of a slice between this process and the region."""
        ours, theirs = part.local, self.memory
        if part.writes:
            self._copy_runs(theirs, ours, part.remote_offsets, part.local_offsets, part.num_bytes)
        else:
            self._copy_runs(ours, theirs, part.local_offsets, part.remote_offsets, part.num_bytes)

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last user of ``memory``."""
        os.close(self._fd)

    def _drain(self, timeout_s: float) -> None:
        event = threading.Event()
        for _ in range(max(1, int(timeout_s / _DRAIN_POLL_S))):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                event.wait(_DRAIN_POLL_S)
                continue
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            return
        raise TransferTimeoutError(
            f"a peer has not ended its transfer within {timeout_s:g} s and stands still"
        )


def new_file(num_bytes: int, epoch: int) -> int:
    """Create a sealed memory file for a region; return its descriptor.

    Raises:
        RefusedError: The system cannot create the file.
    """
    fd = os.memfd_create("banaserve-transport", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, file_bytes(num_bytes))
        os.pwrite(fd, epoch.to_bytes(8, sys.byteorder), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except (OSError, ValueError) as error:
        os.close(fd)
        raise RefusedError(f"cannot make a memory file of {num_bytes} bytes: {error}") from None
    return fd


def file_bytes(num_bytes: int) -> int:
    """Return the size of the file for a region of ``num_bytes``."""
    return PAGE_BYTES + -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _is_sealed(fd: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        return False
