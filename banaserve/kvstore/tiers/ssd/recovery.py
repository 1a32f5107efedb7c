"""Recovery of a log's index from its segments when it is opened."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path

from banaserve.kvstore.tiers.ssd.folder import Folder, segment_ids
from banaserve.kvstore.tiers.ssd.limits import MAX_UNFINISHED
from banaserve.kvstore.tiers.ssd.record import Kind, RecordHeader, padded
from banaserve.kvstore.tiers.ssd.scan import Damage, Found, open_to_read, payload_is_good, scan
from banaserve.kvstore.tiers.ssd.segments import LogBlock, Segment, open_direct, write_filler

_SILENT_S = 2.0
log = logging.getLogger(__name__)


@dataclass
class Recovered:
    """Contents of a folder.

    Attributes:
        segments: Open segments, oldest first.
        blocks: Blocks in the order of their age.
        last_sequence: Largest sequence used so far, including fillers and cleared records.
        num_corrupt: Number of damaged places, each now covered by a filler.
        direct: True if files are open for direct I/O.
    """

    segments: list[Segment] = field(default_factory=list)
    blocks: list[LogBlock] = field(default_factory=list)
    last_sequence: int = 0
    num_corrupt: int = 0
    direct: bool = True


class _Progress:
    def __init__(self, num_segments: int, now: Callable[[], float]) -> None:
        self._num_segments = num_segments
        self._now = now
        self._told_at_s = now()

    def tell(self, num_scanned: int, num_records: int) -> None:
        if self._now() - self._told_at_s >= _SILENT_S:
            self._told_at_s = self._now()
            log.info(
                "reading the SSD tier's index: %d of %d files, %d records",
                num_scanned,
                self._num_segments,
                num_records,
            )


def recover(folder: Folder, now: Callable[[], float] = time.monotonic) -> Recovered:
    """Scan every segment, cover damaged places with fillers, and truncate files to their records.

    Raises:
        OSError: A file cannot be read or written.
    """
    recovered = Recovered(last_sequence=folder.cleared_sequence())
    headers: list[RecordHeader] = []
    damages: list[tuple[int, Damage]] = []
    ids = segment_ids(folder.path)
    progress = _Progress(len(ids), now)
    for num_scanned, segment_id in enumerate(ids):
        for item in _scan(folder.segment_path(segment_id), segment_id):
            if isinstance(item, Found):
                headers.append(item.header)
            else:
                damages.append((segment_id, item))
            progress.tell(num_scanned, len(headers))
    newest = max((header.sequence for header in headers), default=0)
    recovered.last_sequence = max(recovered.last_sequence, newest)
    if not folder.was_closed:
        damages += _unfinished(folder, headers)
    recovered.num_corrupt = len(damages)
    _mend(folder, recovered, damages)
    spoilt = {(segment_id, damage.offset) for segment_id, damage in damages}
    good = [h for h in headers if (h.segment_id, h.offset) not in spoilt]
    _open_segments(folder, recovered, ids, good)
    return recovered


def newest_records(headers: list[RecordHeader], cleared_sequence: int) -> dict[bytes, RecordHeader]:
    """Return the newest valid record of each key; fillers and cleared records are left out."""
    newest: dict[bytes, RecordHeader] = {}
    for header in headers:
        if header.kind is Kind.BLOCK and header.sequence > cleared_sequence:
            known = newest.get(header.key)
            if known is None or header.sequence > known.sequence:
                newest[header.key] = header
    return newest


def _scan(path: Path, segment_id: int) -> list[Found | Damage]:
    fd = open_to_read(path)
    try:
        # Reading ahead would fetch the blocks as well.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        return list(scan(fd, segment_id))
    finally:
        os.close(fd)


def _unfinished(folder: Folder, headers: list[RecordHeader]) -> list[tuple[int, Damage]]:
    """Return the newest records whose bytes were not all written, as damages."""
    blocks = (header for header in headers if header.kind is Kind.BLOCK)
    damages = []
    for header in nlargest(MAX_UNFINISHED, blocks, key=lambda header: header.sequence):
        fd = open_to_read(folder.segment_path(header.segment_id))
        try:
            if not payload_is_good(fd, header):
                damage = Damage(header.offset, header.record_bytes, torn=True)
                damages.append((header.segment_id, damage))
        finally:
            os.close(fd)
    return damages


def _mend(folder: Folder, recovered: Recovered, damages: list[tuple[int, Damage]]) -> None:
    for segment_id, damage in damages:
        fd = os.open(folder.segment_path(segment_id), os.O_RDWR | os.O_CLOEXEC)
        try:
            recovered.last_sequence += 1
            sequence = recovered.last_sequence
            write_filler(fd, segment_id, damage.offset, padded(damage.num_bytes), sequence)
            os.fsync(fd)
        finally:
            os.close(fd)
    if damages:
        log.warning(
            "%d damaged places in %s were skipped; their blocks are lost",
            len(damages),
            folder.path,
        )


def _open_segments(
    folder: Folder, recovered: Recovered, ids: list[int], headers: list[RecordHeader]
) -> None:
    counting = newest_records(headers, folder.cleared_sequence())
    ends = dict.fromkeys(ids, 0)
    for header in counting.values():
        end = header.offset + header.record_bytes
        ends[header.segment_id] = max(ends[header.segment_id], end)
    segments: dict[int, Segment] = {}
    for segment_id, end in ends.items():
        path = folder.segment_path(segment_id)
        if not end:
            path.unlink()
            continue
        fd, direct = open_direct(path)
        recovered.direct &= direct
        os.ftruncate(fd, end)
        segments[segment_id] = Segment(segment_id, fd, end, end)
    recovered.segments = list(segments.values())
    for header in sorted(counting.values(), key=lambda header: (header.age, header.sequence)):
        segment = segments[header.segment_id]
        block = LogBlock(header.key, header.parent, header.num_bytes, segment, header.offset)
        block.checksum, block.age, block.ready = header.checksum, header.age, True
        recovered.blocks.append(block)
        segment.add(block)
