"""Folder of an SSD tier: its lock, its format, and the names of its files."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.record import FORMAT_VERSION, MAX_SEQUENCE

_LOCK = "lock"
_FORMAT = "format"
_CLEARED = "cleared"
TEMPORARY = ".tmp"
_BLOCKS = "blocks"
_NUM_FOLDERS = 256
_FORMAT_LINE = re.compile(rb"banaserve ssd (?:log|files) (\d{1,9})\n")
_BLOCK = re.compile(r"((?:[0-9a-f]{2}){32,80})-([0-3][0-9a-f]{15})\.block(\.tmp)?")
_OURS = {_LOCK, _FORMAT, _CLEARED, _FORMAT + TEMPORARY, _CLEARED + TEMPORARY, _BLOCKS}


def describe(error: OSError, folder: Path) -> str:
    """Return one line on what the system refused, and what to do."""
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
    """Open folder, locked against other processes until ``close``.

    Args:
        path: Path of the folder, created with its parents if it does not exist.

    Raises:
        UserError: The folder is in use, of another version, no SSD tier's, or not writable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = self._lock()
        except OSError as error:
            raise UserError(describe(error, path)) from error
        try:
            self._check_format()
            blocks = path / _BLOCKS
            for folder in (blocks, *(blocks / f"{number:02x}" for number in range(_NUM_FOLDERS))):
                folder.mkdir(mode=0o700, exist_ok=True)
            self._sign()
        except OSError as error:
            os.close(self._lock_fd)
            raise UserError(describe(error, path)) from error
        except UserError:
            os.close(self._lock_fd)
            raise

    def write_cleared(self, sequence: int) -> None:
        """Store that files up to ``sequence`` are no longer valid; survives this process."""
        self._replace(_CLEARED, b"%d\n" % sequence)

    def sync(self) -> None:
        """Make file names, including that of ``write_cleared``, survive a loss of power."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Unlock the folder."""
        os.close(self._lock_fd)

    def _sign(self) -> None:
        """Write this process into the lock file, unless the disk is full."""
        os.ftruncate(self._lock_fd, 0)
        try:
            os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def _lock(self) -> int:
        # In a folder that others can write to, following a link could truncate a file elsewhere.
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
        self._replace(_FORMAT, b"banaserve ssd files %d\n" % FORMAT_VERSION)
        self.sync()

    def _replace(self, name: str, content: bytes) -> None:
        temporary = self.path / (name + TEMPORARY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            # A loss of power after the rename must not leave an empty file of this name.
            os.fsync(fd)
        temporary.rename(self.path / name)


def check_format(path: Path) -> None:
    """Check that ``path`` is an SSD tier's folder of this version; raise UserError if it is not."""
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
    """Return the sequence up to which the folder's files are no longer valid; 0 if none.

    Raises:
        UserError: The file with this sequence is damaged.
        OSError: The file cannot be read.
    """
    try:
        with open(path / _CLEARED, "rb") as file:
            text = file.read(64)
    except FileNotFoundError:
        return 0
    if not re.fullmatch(rb"\d{1,19}\n", text) or int(text) > MAX_SEQUENCE:
        raise UserError(f"{path / _CLEARED} is damaged: remove the folder {path}")
    return int(text)


def is_in_use(path: Path) -> bool:
    """Return whether a store has the folder open."""
    fd = os.open(path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class BlockFile(NamedTuple):
    """File among the blocks, by its name; key and sequence of an unfinished one are empty and 0."""

    path: str
    key: bytes
    sequence: int


def block_name(key: bytes, sequence: int) -> str:
    """Return the path of the file of a block within a tier's folder."""
    folder = xxhash.xxh3_64_intdigest(key) % _NUM_FOLDERS
    return f"{_BLOCKS}/{folder:02x}/{key.hex()}-{sequence:016x}.block"


def block_files(path: Path) -> Iterator[BlockFile]:
    """Yield the files of blocks in a tier's folder; files with other names are left out."""
    for number in range(_NUM_FOLDERS):
        for entry in os.scandir(path / _BLOCKS / f"{number:02x}"):
            if (match := _BLOCK.fullmatch(entry.name)) is None:
                continue
            if match[3]:
                yield BlockFile(entry.path, b"", 0)
            else:
                yield BlockFile(entry.path, bytes.fromhex(match[1]), int(match[2], 16))
