"""Load and store of a block: the steps between submission and completion."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome
from banaserve.kvstore.tiers.ssd.device import BlockDevice, aligned_bytes
from banaserve.kvstore.tiers.ssd.log import SegmentLog
from banaserve.kvstore.tiers.ssd.record import PAGE_BYTES, Kind, RecordHeader, encode, padded
from banaserve.kvstore.tiers.ssd.segments import LogBlock


class Store:
    """Store of a block: checksum, then header and block in one write."""

    def __init__(
        self, ticket: int, began_s: float, block: LogBlock, source: BlockBytes, log: SegmentLog
    ) -> None:
        self.ticket = ticket
        self.began_s = began_s
        self.block = block
        self._source = source
        self._log = log

    def begin(self, device: BlockDevice, then: Callable[[Store, int], None]) -> None:
        """Begin the store; ``then`` gets the bytes written, header included, or -errno."""
        self._device = device
        self._then = then
        self.block.segment.num_users += 1
        device.checksum(self._source, self._write)

    def _write(self, checksum: int) -> None:
        block = self.block
        block.checksum = checksum
        block.age = self._log.next_sequence()
        header = RecordHeader(
            Kind.BLOCK, block.segment.id, block.offset, block.num_bytes,
            block.age, block.age, checksum, block.key, block.parent,
        )  # fmt: skip
        parts = _parts(self._source)
        if (num_odd := block.num_bytes % PAGE_BYTES) != 0:
            parts[-1][:num_odd] = self._source[-num_odd:]
        page = aligned_bytes(PAGE_BYTES)
        page[:] = np.frombuffer(encode(header), dtype=np.uint8)
        self._device.write(block.segment.fd, block.offset, [page, *parts], self._end)

    def _end(self, result: int) -> None:
        self.block.segment.num_users -= 1
        self._then(self, result)


class SegmentLoad:
    """Load of a block: read, then verified."""

    def __init__(self, ticket: int, began_s: float, block: LogBlock, target: BlockBytes) -> None:
        self.ticket = ticket
        self.began_s = began_s
        self.block = block
        self._target = target
        # The block may move to another segment meanwhile; the old segment stays readable.
        self._segment = block.segment

    def begin(self, device: BlockDevice, then: Callable[[SegmentLoad, TierOutcome], None]) -> None:
        """Begin the load; ``then`` gets the outcome."""
        self._device = device
        self._then = then
        self._segment.num_users += 1
        self._parts = _parts(self._target)
        offset = self.block.offset + PAGE_BYTES
        device.read(self._segment.fd, offset, self._parts, self._verify)

    def _verify(self, result: int) -> None:
        self._segment.num_users -= 1
        if result < 0:
            self._then(self, TierOutcome.FAILED)
            return
        if result != padded(self.block.num_bytes):
            self._then(self, TierOutcome.CORRUPT)
            return
        if (num_odd := self.block.num_bytes % PAGE_BYTES) != 0:
            self._target[-num_odd:] = self._parts[-1][:num_odd]
        self._device.checksum(self._target, self._compare)

    def _compare(self, checksum: int) -> None:
        good = checksum == self.block.checksum
        self._then(self, TierOutcome.DONE if good else TierOutcome.CORRUPT)


def _parts(block: BlockBytes) -> list[BlockBytes]:
    """Return a view of a block's whole pages, and a separate page for any remaining bytes."""
    num_whole = block.nbytes // PAGE_BYTES * PAGE_BYTES
    parts = [block[:num_whole]] if num_whole else []
    return parts + ([aligned_bytes(PAGE_BYTES)] if num_whole != block.nbytes else [])
