"""Folder of the log: its owner, its format, and the names of its files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

from banaserve.errors import UserError
from banaserve.kvstore.tiers.ssd.record import FORMAT_VERSION, MAX_SEQUENCE

_LOCK = "lock"
_FORMAT = "format"
_CLEARED = "cleared"
_TEMPORARY = ".tmp"
_FORMAT_LINE = re.compile(rb"banaserve ssd log (\d{1,9})\n")
_SEGMENT = re.compile(r"segment-([0-3][0-9a-f]{15})\.log")
_OURS = {_LOCK, _FORMAT, _CLEARED, _FORMAT + _TEMPORARY, _CLEARED + _TEMPORARY}


def describe(error: OSError, folder: Path) -> str:
    """One line on what the system refused, and what to do."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            advice = "give this user the right to read and write there, or name another folder"
        case errno.EROFS:
            advice = "name a folder on a disk that can be written to"
        case errno.ENOSPC | errno.EDQUOT:
            advice = "make room on that disk, or name a folder on another"
        case errno.ENOTDIR | errno.EEXIST:
            advice = "name a folder"
        case _:
            advice = "check the disk, or name another folder"
    return f"the SSD tier cannot use {folder}: {error.strerror}; {advice}"


class Folder:
    """An open log folder, locked against other processes until ``close``.

    Args:
        path: Created with its parents where it does not exist.

    Attributes:
        was_closed: Whether the last process to use it closed it in good order.

    Raises:
        UserError: In use, of another version, not a log's folder, or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = self._lock()
        except OSError as error:
            raise UserError(describe(error, path)) from error
        try:
            self.was_closed = not os.fstat(self._lock_fd).st_size
            self._check_format()
            self._sign()
        except OSError as error:
            os.close(self._lock_fd)
            raise UserError(describe(error, path)) from error
        except UserError:
            os.close(self._lock_fd)
            raise

    def segment_path(self, segment_id: int) -> Path:
        """Where a segment lies."""
        return segment_path(self.path, segment_id)

    def cleared_sequence(self) -> int:
        """Records up to this sequence do not count any more."""
        return read_cleared(self.path)

    def write_cleared(self, sequence: int) -> None:
        """Say that records up to ``sequence`` do not count any more. Survives this process."""
        self._replace(_CLEARED, b"%d\n" % sequence)

    def sync(self) -> None:
        """Make names, that of what ``write_cleared`` wrote too, survive a loss of power."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Say that everything is in good order and let others in."""
        os.ftruncate(self._lock_fd, 0)
        os.close(self._lock_fd)

    def abandon(self) -> None:
        """Let others in, who will look at the newest records."""
        os.close(self._lock_fd)

    def _sign(self) -> None:
        """Say that the log is in use. A length alone does, and takes no room on a full disk."""
        os.ftruncate(self._lock_fd, 1)
        try:
            os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _lock(self) -> int:
        # In a folder that others can write to, a link would have us cut a file elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self.path / _LOCK, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(fd, 20, 0).decode(errors="replace").strip("\0\n ")
            os.close(fd)
            raise UserError(
                f"{self.path} is in use by another store (process {owner or 'unknown'}): "
                "stop it, or name another folder"
            ) from None
        return fd

    def _check_format(self) -> None:
        if (self.path / _FORMAT).exists():
            check_format(self.path)
            return
        strangers = sorted({entry.name for entry in os.scandir(self.path)} - _OURS)
        if strangers:
            raise UserError(
                f"{self.path} holds {strangers[0]} and is no SSD tier's folder: "
                "name an empty folder or one that does not exist"
            )
        self._replace(_FORMAT, b"banaserve ssd log %d\n" % FORMAT_VERSION)
        self.sync()

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / (name + _TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            # Power that fails behind the rename must not leave the name with nothing in it.
            os.fsync(fd)
        temporary.rename(self.path / name)


def check_usable(path: Path) -> None:
    """Return if a store can have its log in ``path``, which is made where it is not there.

    Raises:
        UserError: It cannot, for the reasons of ``Folder``.
    """
    folder = Folder(path)
    if folder.was_closed:
        folder.close()
    else:
        folder.abandon()


def check_format(path: Path) -> None:
    """Raise unless ``path`` is a log's folder of this version.

    Raises:
        UserError: It is not.
        OSError: It cannot be read.
    """
    with open(path / _FORMAT, "rb") as file:
        match = _FORMAT_LINE.fullmatch(file.read(64))
    if match is None:
        raise UserError(f"{path} is no SSD tier's folder: name another")
    if int(match[1]) != FORMAT_VERSION:
        raise UserError(
            f"{path} has format {int(match[1])} and this version reads {FORMAT_VERSION}: "
            "name another folder, or remove this one"
        )


def read_cleared(path: Path) -> int:
    """Records of the folder up to this sequence do not count any more.

    Raises:
        UserError: The file that says so is damaged.
        OSError: It cannot be read.
    """
    try:
        with open(path / _CLEARED, "rb") as file:
            text = file.read(64)
    except FileNotFoundError:
        return 0
    if not re.fullmatch(rb"\d{1,19}\n", text) or int(text) > MAX_SEQUENCE:
        raise UserError(f"{path / _CLEARED} is damaged: remove the folder {path}")
    return int(text)


def lock_state(path: Path) -> tuple[bool, bool]:
    """Whether a store has the folder open, and whether the last one closed it in good order.

    Raises:
        OSError: The lock file cannot be read.
    """
    fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        was_closed = not os.pread(fd, 1, 0)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True, False
    finally:
        os.close(fd)
    return False, was_closed


def segment_path(path: Path, segment_id: int) -> Path:
    """Where a segment of the log in ``path`` lies."""
    return path / f"segment-{segment_id:016x}.log"


def segment_ids(path: Path) -> list[int]:
    """Of the segments in a log's folder, oldest first."""
    matches = (_SEGMENT.fullmatch(entry.name) for entry in os.scandir(path))
    return sorted(int(match[1], 16) for match in matches if match)
