"""Verification of a tier's folder, file by file, without changing it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.folder import (
    BlockFile,
    block_files,
    check_format,
    describe,
    is_in_use,
    read_cleared,
)
from banaserve.kvstore.tiers.ssd.scan import (
    newest_files,
    open_to_read,
    payload_is_good,
    read_header,
)

NAMESPACE_BYTES = 16
MAX_PROBLEM_LINES = 100


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
            fd = open_to_read(file.path)
        except FileNotFoundError:
            # A store that has the folder open may have deleted it.
            continue
        try:
            report.num_files += 1
            report.num_bytes += os.fstat(fd).st_size
            if not file.key:
                _note(report, "torn", file)
            elif (header := read_header(fd, file)) and payload_is_good(fd, header):
                good.append(file)
            else:
                _note(report, "corrupt", file)
        finally:
            os.close(fd)
    valid = newest_files(good, read_cleared(path))
    report.num_ok, report.num_dead = len(valid), len(good) - len(valid)
    names = Counter(key[:NAMESPACE_BYTES].hex() for key in valid)
    report.blocks_by_namespace = dict(sorted(names.items()))
    return report


def _note(report: CheckReport, word: str, file: BlockFile) -> None:
    report.num_torn += word == "torn"
    report.num_corrupt += word == "corrupt"
    if len(report.problems) < MAX_PROBLEM_LINES:
        report.problems.append(f"{word}: {os.path.basename(file.path)}")
