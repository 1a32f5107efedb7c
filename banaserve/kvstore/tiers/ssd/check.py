"""Verification of a log's folder, record by record, without changing it."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.folder import (
    check_format,
    describe,
    lock_state,
    read_cleared,
    segment_ids,
    segment_path,
)
from banaserve.kvstore.tiers.ssd.limits import MAX_UNFINISHED
from banaserve.kvstore.tiers.ssd.record import Kind, RecordHeader
from banaserve.kvstore.tiers.ssd.recovery import newest_records
from banaserve.kvstore.tiers.ssd.scan import Damage, Found, open_to_read, payload_is_good, scan

NAMESPACE_BYTES = 16
MAX_PROBLEM_LINES = 100


@dataclass
class CheckReport:
    """Contents of a folder.

    Attributes:
        in_use: True if a store has the folder open: its newest records may be incomplete.
        num_segments: Number of segment files.
        num_bytes: Total size of the segment files.
        num_ok: Number of records that are good and valid.
        num_dead: Number of good records that are no longer valid: superseded, or cleared.
        num_torn: Number of places, at the end of a file or among unfinished records, where a write
            was cut short.
        num_corrupt: Number of records, or places between records, with wrong bytes.
        blocks_by_namespace: Number of records that are good and valid, by namespace in hex.
        problems: Lines for the torn and corrupt places, one for each, at most a hundred.
    """

    in_use: bool = False
    num_segments: int = 0
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


class _Check:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = CheckReport()
        self.cleared_sequence = read_cleared(path)
        self.report.in_use, was_closed = lock_state(path)
        self.headers: list[RecordHeader] = []
        self.bad: set[tuple[int, int]] = set()
        self._may_be_torn = not was_closed

    def run(self) -> CheckReport:
        items = {segment_id: self._scan(segment_id) for segment_id in segment_ids(self.path)}
        newest = max((header.sequence for header in self.headers), default=0)
        # If the last store did not close the folder properly, the newest records may be unfinished.
        unfinished = newest - MAX_UNFINISHED if self._may_be_torn else newest
        for segment_id, found in items.items():
            self._verify(segment_id, found, unfinished)
        good = [h for h in self.headers if (h.segment_id, h.offset) not in self.bad]
        counting = newest_records(good, self.cleared_sequence)
        self.report.num_ok = len(counting)
        num_blocks = sum(header.kind is Kind.BLOCK for header in good)
        self.report.num_dead = num_blocks - len(counting)
        names = Counter(key[:NAMESPACE_BYTES].hex() for key in counting)
        self.report.blocks_by_namespace = dict(sorted(names.items()))
        return self.report

    def _scan(self, segment_id: int) -> list[Found | Damage]:
        fd = self._open(segment_id)
        if fd is None:
            return []
        try:
            self.report.num_segments += 1
            self.report.num_bytes += os.fstat(fd).st_size
            items = list(scan(fd, segment_id))
        finally:
            os.close(fd)
        self.headers += [item.header for item in items if isinstance(item, Found)]
        return items

    def _verify(self, segment_id: int, items: list[Found | Damage], unfinished: int) -> None:
        fd = self._open(segment_id)
        if fd is None:
            return
        try:
            # Backwards: bytes before a record were written before the record, with few exceptions.
            sequence = 0
            for item in reversed(items):
                if isinstance(item, Damage):
                    torn = item.torn or sequence > unfinished
                    self._count(torn, segment_id, item.offset, f"{item.num_bytes} bytes")
                    continue
                header = item.header
                sequence = header.sequence
                if header.kind is Kind.BLOCK and not payload_is_good(fd, header):
                    self.bad.add((segment_id, header.offset))
                    torn = sequence > unfinished
                    self._count(torn, segment_id, header.offset, f"block {header.key.hex()}")
        finally:
            os.close(fd)

    def _count(self, torn: bool, segment_id: int, offset: int, what: str) -> None:
        self.report.num_torn += torn
        self.report.num_corrupt += not torn
        if len(self.report.problems) < MAX_PROBLEM_LINES:
            word = "torn" if torn else "corrupt"
            name = segment_path(self.path, segment_id).name
            self.report.problems.append(f"{word}: {what} at {offset} of {name}")

    def _open(self, segment_id: int) -> int | None:
        try:
            return open_to_read(segment_path(self.path, segment_id))
        except FileNotFoundError:
            # A store that has the folder open may have removed the segment.
            return None


def check_folder(path: Path) -> CheckReport:
    """Verify every record of a log's folder, header and bytes. Changes nothing.

    It works while a store has the folder open; then records that the store is just writing may look
    torn, and ``in_use`` is True.

    Raises:
        UserError: There is no log in the folder, it is of another version, or it cannot be read.
    """
    try:
        check_format(path)
        return _Check(path).run()
    except FileNotFoundError as error:
        raise UserError(f"{path} is no SSD tier's folder: name the one given to --ssd") from error
    except OSError as error:
        raise UserError(describe(error, path)) from error
