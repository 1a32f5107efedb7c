"""Cleaning of the log: eviction of blocks, and emptying of segments by moving their live blocks."""

from __future__ import annotations

from collections.abc import Callable

from banaserve.kvstore.tiers.chains import ChainedBlocks
from banaserve.kvstore.tiers.counters import TierCounters
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.tiers.ssd.device import BlockDevice, aligned_bytes
from banaserve.kvstore.tiers.ssd.limits import MAX_COPIES
from banaserve.kvstore.tiers.ssd.log import SegmentLog
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES, Kind, RecordHeader, encode
from banaserve.kvstore.tiers.ssd.segments import LogBlock, Segment

# A segment is cleaned only if half of it is dead: then at most as many bytes are copied as freed.
MAX_LIVE_FRACTION = 0.5
# Maximum for each call: an eviction takes microseconds, and an event loop waits for the call.
MAX_EVICTIONS = 64


class Cleaner:
    """Cleaner that keeps about a segment's size of the budget free, in small steps.

    Args:
        log: Log of the records.
        blocks: Blocks to evict from.
        device: Device with ``MAX_COPIES`` transfers reserved for copies.
        counters: Counters of evictions and corrupt records.
    """

    def __init__(
        self,
        log: SegmentLog,
        blocks: ChainedBlocks[LogBlock],
        device: BlockDevice,
        counters: TierCounters,
    ) -> None:
        self.num_copies = 0
        self._log = log
        self._blocks = blocks
        self._device = device
        self._counters = counters
        self._victim: Segment | None = None
        self._waiting: list[LogBlock] = []

    def step(self, *, loads_under_way: bool) -> None:
        """Evict and remove what is possible at once, and begin copies, which take time.

        Args:
            loads_under_way: True if loads are under way: then only one copy runs at a time, so
                that the disk serves the loads.
        """
        self._log.remove_dead()
        self._copy_more(1 if loads_under_way else MAX_COPIES)
        for _ in range(MAX_EVICTIONS):
            if self._victim is not None or not self._log.is_short or self._is_freeing():
                return
            if self._choose():
                self._copy_more(1 if loads_under_way else MAX_COPIES)
                return
            if not self._evict():
                return
        self._device.wake()

    def stop(self) -> None:
        """Begin no further copies."""
        self._waiting.clear()

    def _is_freeing(self) -> bool:
        """Return whether a sealed segment without live blocks is about to be removed."""
        return any(not segment.live_bytes for segment in self._log.sealed())

    def _evict(self) -> bool:
        block = self._blocks.pop_victim()
        if block is None:
            return False
        self._log.kill(block)
        self._counters.evictions += 1
        self._log.retire()
        self._log.remove_dead()
        return True

    def _choose(self) -> bool:
        """Choose a segment worth cleaning, with room for its live records; False if none."""
        segment = min(filter(_pays, self._log.sealed()), key=lambda s: s.live_bytes, default=None)
        if segment is None:
            return False
        if not self._log.has_room(self._log.copies, segment.live_bytes):
            return False
        # Blocks that are about to be evicted are not worth a copy: if few blocks are used twice,
        # the oldest segment becomes empty by evictions alone.
        coldest = self._blocks.next_victim()
        if coldest is not None and coldest.segment is segment:
            return False
        self._victim = segment
        segment.num_users += 1
        self._waiting = sorted(segment.blocks.values(), key=lambda block: -block.offset)
        return True

    def _copy_more(self, max_copies: int) -> None:
        while self._victim is not None and self.num_copies < max_copies and self._waiting:
            block = self._waiting[-1]
            lives = self._blocks.get(block.key) is block and block.segment is self._victim
            if not lives or self._begin(block):
                self._waiting.pop()
            elif self._log.copies.is_creating:
                return
            else:
                self._waiting.clear()
        if self._victim is not None and not self._waiting and not self.num_copies:
            self._victim.num_users -= 1
            self._victim = None
            self._log.remove_dead()

    def _begin(self, block: LogBlock) -> bool:
        placed = self._log.place(self._log.copies, block.record_bytes)
        if placed is None:
            return False
        self.num_copies += 1
        block.is_copied = True
        self._blocks.begin_use(block)
        placed[0].num_users += 1
        _Copy(self._device, self._log, block, *placed, self._end).begin()
        return True

    def _end(self, block: LogBlock, segment: Segment, offset: int, outcome: _CopyOutcome) -> None:
        self.num_copies -= 1
        segment.num_users -= 1
        block.is_copied = False
        self._blocks.end_use(block)
        gone = self._blocks.get(block.key) is not block
        if gone or outcome is not _COPIED:
            self._log.cover(segment, offset, block.record_bytes)
        if gone:
            return
        if outcome is _COPIED:
            block.segment.remove(block)
            block.segment, block.offset = segment, offset
            segment.add(block)
        elif outcome is _UNWRITTEN:
            self._counters.failures += 1
        else:
            # A block that cannot be read must be removed, or its segment would be chosen for ever.
            self._blocks.remove(block)
            self._log.kill(block)
            self._counters.corrupt += outcome is _CORRUPT
            self._counters.failures += outcome is _UNREAD


def _pays(segment: Segment) -> bool:
    """Return whether enough of a sealed segment is dead, and its live blocks are written."""
    if segment.live_bytes > MAX_LIVE_FRACTION * segment.size_bytes:
        return False
    # The last stores into a segment may still be under way when it is sealed.
    return all(block.ready for block in segment.blocks.values())


_CopyOutcome = str
_COPIED, _CORRUPT, _UNREAD, _UNWRITTEN = "copied", "corrupt", "unread", "unwritten"


class _Copy:
    """Copy of one record to another segment: read, verified, written."""

    def __init__(
        self,
        device: BlockDevice,
        log: SegmentLog,
        block: LogBlock,
        segment: Segment,
        offset: int,
        then: Callable[[LogBlock, Segment, int, _CopyOutcome], None],
    ) -> None:
        self._device = device
        self._log = log
        self._block = block
        self._segment = segment
        self._offset = offset
        self._then = then
        # Assigned before anything is read: if the block is cleared meanwhile, so is its copy.
        self._sequence = log.next_sequence()
        self._record: BlockBytes = aligned_bytes(block.record_bytes)

    def begin(self) -> None:
        block = self._block
        self._device.read(block.segment.fd, block.offset, [self._record], self._verify)

    def _verify(self, result: int) -> None:
        if result < 0:
            self._end(_UNREAD)
        elif result != self._record.nbytes:
            self._end(_CORRUPT)
        else:
            data = self._record[PAGE_BYTES : PAGE_BYTES + self._block.num_bytes]
            self._device.checksum(data, self._write)

    def _write(self, checksum: int) -> None:
        block = self._block
        if checksum != block.checksum:
            self._end(_CORRUPT)
            return
        header = RecordHeader(
            Kind.BLOCK, self._segment.id, self._offset, block.num_bytes,
            self._sequence, block.age, checksum, block.key, block.parent,
        )  # fmt: skip
        self._record[:PAGE_BYTES] = memoryview(encode(header))
        self._device.write(self._segment.fd, self._offset, [self._record], self._written)

    def _written(self, result: int) -> None:
        if result == self._record.nbytes:
            self._end(_COPIED)
            return
        self._log.fail(self._segment, result)
        self._end(_UNWRITTEN)

    def _end(self, outcome: _CopyOutcome) -> None:
        self._then(self._block, self._segment, self._offset, outcome)
