"""Allocation of records in the log: segments and the bytes that they use on disk."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterator

from banaserve.kvstore.tiers.ssd.device import BlockDevice
from banaserve.kvstore.tiers.ssd.folder import Folder, describe
from banaserve.kvstore.tiers.ssd.segments import (
    Lane,
    LogBlock,
    Segment,
    create_segment,
    remove_segment,
    reserve,
    write_filler,
)

RETRY_S = 5.0
log = logging.getLogger(__name__)


class SegmentLog:
    """Segments of a folder within a budget of bytes on disk.

    Args:
        folder: Folder of the segments.
        device: Device that makes the slow calls.
        capacity_bytes: Budget: maximum total size of the files.
        segment_bytes: Size of a file; a file with a single large record may be larger.
        now: Monotonic clock, in seconds.

    Attributes:
        problem: Reason why nothing can be stored at present; empty if blocks can be stored.
        direct: True if files are open for direct I/O.
    """

    def __init__(
        self,
        folder: Folder,
        device: BlockDevice,
        capacity_bytes: int,
        segment_bytes: int,
        now: Callable[[], float],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = segment_bytes
        self.problem = ""
        self.direct = True
        self.used_bytes = 0
        # One segment stays free for copies, otherwise there could be no room to move live records.
        self.stores = Lane(segment_bytes)
        self.copies = Lane(0)
        self._folder = folder
        self._device = device
        self._now = now
        self._retry_at_s = 0.0
        self._segments: dict[int, Segment] = {}
        self._last_id = 0
        self._last_sequence = 0

    @property
    def free_bytes(self) -> int:
        """Number of free bytes of the budget; below 0 if the budget was reduced."""
        return self.capacity_bytes - self.used_bytes

    @property
    def is_short(self) -> bool:
        """Return whether space should be freed, so that the next segment is created in time."""
        ahead = self.stores.next is not None or self.stores.is_creating
        wanted_bytes = self.segment_bytes * (1 if ahead else 2)
        return self.free_bytes < wanted_bytes

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest record."""
        return self._last_sequence

    def next_sequence(self) -> int:
        """Return the sequence of a new record."""
        self._last_sequence += 1
        return self._last_sequence

    def fits(self, num_record_bytes: int) -> bool:
        """Return whether a record of this size can ever be stored within the budget."""
        return num_record_bytes + 2 * self.segment_bytes <= self.capacity_bytes

    def has_room(self, lane: Lane, num_bytes: int) -> bool:
        """Return whether records of ``num_bytes`` in total fit, perhaps in a new segment."""
        if lane.current is not None and lane.current.room_bytes >= num_bytes:
            return True
        if lane.next is not None or lane.is_creating:
            return True
        return self.may_try and self.free_bytes - self.segment_bytes >= lane.reserve_bytes

    def adopt(self, segments: list[Segment], last_sequence: int) -> None:
        """Take over the segments of a scan, oldest first, and append to the last one. Blocks."""
        for segment in segments:
            self._segments[segment.id] = segment
            self.used_bytes += segment.size_bytes
            self._last_id = segment.id
            segment.is_open = False
        self._last_sequence = last_sequence
        if not segments or segments[-1].size_bytes >= self.segment_bytes:
            return
        last = segments[-1]
        wanted_bytes = self.segment_bytes - last.size_bytes
        if self.free_bytes - wanted_bytes < self.stores.reserve_bytes:
            return
        try:
            reserve(last.fd, self.segment_bytes)
        except OSError as error:
            self.report(error)
            return
        self.used_bytes += wanted_bytes
        last.size_bytes = self.segment_bytes
        last.is_open = True
        self.stores.current = last

    def note_direct(self, direct: bool) -> None:
        """Log once if the file system refuses direct I/O."""
        if self.direct and not direct:
            log.warning("%s takes no direct I/O: blocks go through memory", self._folder.path)
        self.direct = direct

    def sealed(self) -> Iterator[Segment]:
        """Return the segments to which nothing is appended any more."""
        return (segment for segment in self._segments.values() if not segment.is_open)

    def place(self, lane: Lane, num_bytes: int) -> tuple[Segment, int] | None:
        """Take room for a record; None if there is none yet: then begin a segment if allowed."""
        if lane.current is None or lane.current.room_bytes < num_bytes:
            if lane.next is None or lane.next.size_bytes < num_bytes:
                self._create(lane, max(self.segment_bytes, num_bytes))
                return None
            self.seal(lane)
            lane.current, lane.next = lane.next, None
        segment = lane.current
        assert segment is not None
        offset = segment.end
        segment.end += num_bytes
        if lane is self.stores and 2 * segment.end > segment.size_bytes and lane.next is None:
            self._create(lane, self.segment_bytes)
        return segment, offset

    def seal(self, lane: Lane) -> None:
        """Stop appending to the lane's segment, and free the bytes that it does not use."""
        segment = lane.current
        if segment is None:
            return
        lane.current = None
        segment.is_open = False
        if segment.room_bytes and segment.end:
            self._cut(segment)

    def kill(self, block: LogBlock) -> None:
        """Mark the record of a block as dead."""
        block.segment.remove(block)

    def cover(self, segment: Segment, offset: int, num_bytes: int) -> None:
        """Write a filler over the place of a failed write or a dead copy, so that scans skip it."""
        segment.num_users += 1
        fd, sequence = segment.fd, self.next_sequence()

        def end(_: object) -> None:
            segment.num_users -= 1

        self._device.call(lambda: write_filler(fd, segment.id, offset, num_bytes, sequence), end)

    def remove_dead(self) -> None:
        """Delete sealed segments without live blocks and users."""
        dead = [s for s in self.sealed() if not s.live_bytes and not s.num_users]
        for segment in dead:
            segment.num_users += 1
            self._remove(segment)

    def retire(self) -> None:
        """Seal the current segments that hold records but no live ones."""
        for lane in (self.stores, self.copies):
            segment = lane.current
            if segment is not None and segment.end and not segment.live_bytes:
                self.seal(lane)

    def fail(self, segment: Segment, result: int) -> None:
        """Note a failed write to a segment with ``result``: use another segment, later."""
        for lane in (self.stores, self.copies):
            if lane.current is segment:
                self.seal(lane)
        number = -result if result < 0 else errno.EIO
        self.report(OSError(number, os.strerror(number)))

    def report(self, error: OSError) -> None:
        """Accept no stores for a while, and log the reason once."""
        self._retry_at_s = self._now() + RETRY_S
        problem = describe(error, self._folder.path)
        if problem != self.problem:
            self.problem = problem
            log.error("nothing more is stored for now: %s", problem)

    @property
    def may_try(self) -> bool:
        """Return whether stores may be tried, after a problem only once the pause is over."""
        return not self.problem or self._now() >= self._retry_at_s

    def recover(self) -> None:
        """Clear the problem, because a store or a new file has succeeded."""
        if self.problem:
            self.problem = ""
            log.info("blocks are stored again in %s", self._folder.path)

    def close(self) -> None:
        """Truncate every file to its records and close it. Blocks; no transfer may be under way."""
        for segment in self._segments.values():
            if segment.is_open:
                os.ftruncate(segment.fd, segment.end)
            os.close(segment.fd)
            if not segment.end:
                self._folder.segment_path(segment.id).unlink()

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        for segment in self._segments.values():
            blocks = segment.blocks.values()
            assert segment.live_bytes == sum(block.record_bytes for block in blocks)
            assert segment.live_bytes <= segment.end <= segment.size_bytes
            assert all(block.segment is segment for block in blocks)
            assert segment.num_users >= 0
            spans = sorted((block.offset, block.record_bytes) for block in blocks)
            end = 0
            for offset, num_bytes in spans:
                assert offset >= end, "two records overlap"
                end = offset + num_bytes
            assert end <= segment.end

    def _create(self, lane: Lane, size_bytes: int) -> None:
        lane.is_starved = self.free_bytes - size_bytes < lane.reserve_bytes
        if lane.is_creating or lane.is_starved or not self.may_try:
            return
        lane.is_creating = True
        self.used_bytes += size_bytes
        self._last_id += 1
        segment_id = self._last_id
        path = self._folder.segment_path(segment_id)

        def end(result: tuple[int, bool] | OSError) -> None:
            lane.is_creating = False
            if isinstance(result, OSError):
                self.used_bytes -= size_bytes
                self.report(result)
                return
            fd, direct = result
            self.note_direct(direct)
            self._replace_next(lane, Segment(segment_id, fd, size_bytes))

        self._device.call(lambda: create_segment(path, size_bytes), end)

    def _replace_next(self, lane: Lane, segment: Segment) -> None:
        # A next segment that is too small for the current blocks stays unused.
        if lane.next is not None:
            lane.next.is_open = False
        self._segments[segment.id] = segment
        lane.next = segment
        self.recover()

    def _cut(self, segment: Segment) -> None:
        segment.num_users += 1
        fd, end_bytes = segment.fd, segment.end

        def end(result: OSError | None) -> None:
            segment.num_users -= 1
            if result is None:
                self.used_bytes -= segment.size_bytes - end_bytes
                segment.size_bytes = end_bytes

        self._device.call(lambda: os.ftruncate(fd, end_bytes), end)

    def _remove(self, segment: Segment) -> None:
        path, fd = self._folder.segment_path(segment.id), segment.fd

        def end(result: OSError | None) -> None:
            del self._segments[segment.id]
            if isinstance(result, OSError):
                # The file still exists, so its bytes still count in the budget.
                self.report(result)
                return
            self.used_bytes -= segment.size_bytes

        self._device.call(lambda: remove_segment(path, fd), end)
