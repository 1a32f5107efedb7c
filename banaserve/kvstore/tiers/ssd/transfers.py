"""Load and store of a block: the steps between submission and completion."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import numpy as np

from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome
from banaserve.kvstore.tiers.ssd.device import BlockDevice, aligned_bytes
from banaserve.kvstore.tiers.ssd.files import BlockFiles, DiskBlock, open_direct
from banaserve.kvstore.tiers.ssd.record import (
    PAGE_BYTES,
    RecordHeader,
    checksum,
    encode,
    padded,
)


class Store:
    """Store of a block: checksum, then header and block in one write, then the file's name."""

    def __init__(
        self, ticket: int, began_s: float, block: DiskBlock, source: BlockBytes, files: BlockFiles
    ) -> None:
        self.ticket = ticket
        self.began_s = began_s
        self.block = block
        self._source = source
        self._files = files

    def begin(self, device: BlockDevice, then: Callable[[Store, OSError | None], None]) -> None:
        """Begin the store; ``then`` gets the error, if any: then there is no file."""
        self._device = device
        self._then = then
        self._files.begin_file(self.block, self._source, self._write)

    def _write(self, fd: int | OSError) -> None:
        if isinstance(fd, OSError):
            self._then(self, fd)
            return
        self._fd = fd
        block = self.block
        header = RecordHeader(
            block.num_bytes, block.sequence, block.checksum, block.key, block.parent
        )
        parts = _parts(self._source)
        if (num_odd := block.num_bytes % PAGE_BYTES) != 0:
            parts[-1][:num_odd] = self._source[-num_odd:]
        page = aligned_bytes(PAGE_BYTES)
        page[:] = np.frombuffer(encode(header), dtype=np.uint8)
        self._device.write(fd, 0, [page, *parts], self._publish)

    def _publish(self, result: int) -> None:
        if result == self.block.file_bytes:
            self._files.publish(self.block, self._fd, self._end)
            return
        self._files.abandon(self.block, self._fd)
        number = -result if result < 0 else errno.EIO
        self._then(self, OSError(number, os.strerror(number)))

    def _end(self, error: OSError | None) -> None:
        self._then(self, error)


class BlockLoad:
    """Load of a block: open, read, then verified."""

    def __init__(
        self, ticket: int, began_s: float, block: DiskBlock, path: str, target: BlockBytes
    ) -> None:
        self.ticket = ticket
        self.began_s = began_s
        self.block = block
        self._path = path
        self._target = target

    def begin(self, device: BlockDevice, then: Callable[[BlockLoad, TierOutcome], None]) -> None:
        """Begin the load; ``then`` gets the outcome."""
        self._device = device
        self._then = then
        device.loads.submit(lambda: open_direct(self._path, os.O_RDONLY), self._read)

    def _read(self, result: tuple[int, bool] | OSError) -> None:
        if isinstance(result, OSError):
            gone = isinstance(result, FileNotFoundError)
            self._then(self, TierOutcome.CORRUPT if gone else TierOutcome.FAILED)
            return
        self._fd = result[0]
        self._parts = _parts(self._target)
        self._device.read(self._fd, PAGE_BYTES, self._parts, self._verify)

    def _verify(self, result: int) -> None:
        os.close(self._fd)
        if result < 0:
            self._then(self, TierOutcome.FAILED)
            return
        if result != padded(self.block.num_bytes):
            self._then(self, TierOutcome.CORRUPT)
            return
        if (num_odd := self.block.num_bytes % PAGE_BYTES) != 0:
            self._target[-num_odd:] = self._parts[-1][:num_odd]
        self._device.loads.submit(lambda: checksum(self._target), self._compare)

    def _compare(self, digest: int) -> None:
        good = digest == self.block.checksum
        self._then(self, TierOutcome.DONE if good else TierOutcome.CORRUPT)


def _parts(block: BlockBytes) -> list[BlockBytes]:
    """Return a view of a block's whole pages, and a separate page for any remaining bytes."""
    num_whole = block.nbytes // PAGE_BYTES * PAGE_BYTES
    parts = [block[:num_whole]] if num_whole else []
    return parts + ([aligned_bytes(PAGE_BYTES)] if num_whole != block.nbytes else [])
