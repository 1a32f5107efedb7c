"""KV blocks on a local disk, in an append-only log that survives a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from banaserve.base.errors import UserError
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.sizes import format_size
from banaserve.kvstore.tiers.chains import ChainedBlocks
from banaserve.kvstore.tiers.counters import TierCounters
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    TierOutcome,
    TierStats,
)
from banaserve.kvstore.tiers.ssd.cleaner import Cleaner
from banaserve.kvstore.tiers.ssd.device import BlockDevice
from banaserve.kvstore.tiers.ssd.folder import Folder, describe
from banaserve.kvstore.tiers.ssd.limits import MAX_COPIES, check_limits, default_segment_bytes
from banaserve.kvstore.tiers.ssd.log import SegmentLog
from banaserve.kvstore.tiers.ssd.record import MAX_BLOCK_BYTES, record_bytes
from banaserve.kvstore.tiers.ssd.recovery import Recovered, recover
from banaserve.kvstore.tiers.ssd.segments import LogBlock
from banaserve.kvstore.tiers.ssd.transfers import SegmentLoad, Store

DEFAULT_QUEUE_DEPTH = 16
log = logging.getLogger(__name__)


class SsdTier:
    """Tier on a local disk; see ``StoreTier``.

    A block that is being written is PENDING. A block that was evicted may be found again after a
    restart, as long as its record has not been removed by cleaning; a cleared block is not found.

    Args:
        folder: Folder of the log; created if it does not exist. One process at a time uses it.
        capacity_bytes: Budget: maximum total size of the files.
        queue_depth: Maximum number of loads and stores at a time; stores get at most three
            quarters of it.
        engine: Engine of the ``DiskQueue``: auto, io_uring or threads.
        segment_bytes: Size of a file of the log; derived from the budget if not given.
        now: Monotonic clock, in seconds.

    Raises:
        UserError: The folder cannot be used, or an argument is invalid; one line says why.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        engine: str = "auto",
        segment_bytes: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        check_limits(capacity_bytes, queue_depth)
        self._now = now
        self._queue_depth = queue_depth
        self._max_stores = max(1, queue_depth * 3 // 4)
        self._counters = TierCounters()
        self._blocks: ChainedBlocks[LogBlock] = ChainedBlocks()
        self._folder = Folder(folder)
        try:
            recovered = recover(self._folder, now)
            self._device = BlockDevice(queue_depth + MAX_COPIES, engine)
        except OSError as error:
            self._folder.abandon()
            raise UserError(describe(error, folder)) from error
        segment_bytes = segment_bytes or default_segment_bytes(capacity_bytes)
        self._log = SegmentLog(self._folder, self._device, capacity_bytes, segment_bytes, now)
        self._cleaner = Cleaner(self._log, self._blocks, self._device, self._counters)
        self._adopt(recovered)
        self._loads: dict[int, SegmentLoad] = {}
        self._stores: dict[int, Store] = {}
        self._ended: list[Completion] = []
        self._last_ticket = 0
        self._too_large = ""
        self._keeps = ""
        self._cleaner.step(loads_under_way=False)

    @property
    def name(self) -> str:
        return "ssd"

    @property
    def fd(self) -> int:
        return self._device.fd

    @property
    def engine(self) -> str:
        """Engine that moves the bytes: io_uring or threads."""
        return self._device.queue.engine

    @property
    def direct(self) -> bool:
        """Return whether file I/O bypasses the page cache; some file systems refuse this."""
        return self._log.direct

    @property
    def is_idle(self) -> bool:
        """Return whether no load, store or cleaning is under way."""
        return self._device.is_idle

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key."""
        blocks = map(self._blocks.get, keys)
        return [
            Lookup.MISS if block is None else Lookup.HIT if block.ready else Lookup.PENDING
            for block in blocks
        ]

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Begin to write a block; see ``StoreTier``."""
        if self._blocks.get(block.key) is not None or not self._may_store(source.nbytes):
            return None
        placed = self._log.place(self._log.stores, record_bytes(source.nbytes))
        if placed is None:
            self._step()
            return None
        entry = LogBlock(block.key, block.parent, source.nbytes, *placed)
        self._blocks.add(entry)
        self._blocks.begin_use(entry)
        entry.segment.add(entry)
        self._last_ticket += 1
        store = Store(self._last_ticket, self._now(), entry, source, self._log)
        self._stores[store.ticket] = store
        self._counters.store_speed.begin(store.began_s)
        store.begin(self._device, self._end_store)
        return store.ticket

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block; see ``StoreTier``."""
        block = self._blocks.get(key)
        if block is None or not block.ready or block.num_bytes != target.nbytes:
            self._counters.missing += 1
            return None
        if len(self._loads) + len(self._stores) >= self._queue_depth:
            return None
        self._blocks.touch(block)
        self._blocks.begin_use(block)
        self._last_ticket += 1
        load = SegmentLoad(self._last_ticket, self._now(), block, target)
        self._loads[load.ticket] = load
        self._counters.load_speed.begin(load.began_s)
        load.begin(self._device, self._end_load)
        return load.ticket

    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call."""
        self._device.poll()
        self._step()
        ended, self._ended = self._ended, []
        return ended

    def evict(self, key: bytes) -> bool:
        """Forget a block, even if it has children; return whether it was forgotten."""
        block = self._blocks.get(key)
        if block is None or block.is_busy:
            return False
        self._forget(block)
        self._step()
        return True

    def clear(self) -> int:
        """Forget all blocks not in use; return their number. A restart finds no old block."""
        idle = [block for block in self._blocks if not block.is_busy]
        for block in idle:
            self._forget(block)
        try:
            self._folder.write_cleared(self._log.last_sequence)
            self._keeps = ""
        except OSError as error:
            self._log.report(error)
            self._keeps = "records that a restart will find"
        self._device.call(self._folder.sync, self._report_if_error)
        self._log.retire()
        self._step()
        return len(idle)

    def stats(self) -> TierStats:
        """Return the current counters and gauges."""
        stats = self._counters.stats(
            self.name,
            problem=self._log.problem or self._too_large,
            capacity_bytes=self._log.capacity_bytes,
            used_bytes=self._log.used_bytes,
            num_blocks=len(self._blocks) - len(self._stores),
            in_flight=len(self._loads) + len(self._stores),
        )
        return msgspec.structs.replace(stats, keeps=self._keeps)

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        self._blocks.check()
        self._log.check()
        for block in self._blocks:
            assert block.segment.blocks[block.key] is block
            assert block.ready or block.num_users, "a block is being written by nobody"
        users = [store.block for store in self._stores.values()]
        users += [load.block for load in self._loads.values()]
        num_copied = sum(block.is_copied for block in self._blocks)
        assert num_copied <= self._cleaner.num_copies <= MAX_COPIES
        assert sum(block.num_users for block in self._blocks) <= len(users) + num_copied
        assert len(self._loads) + len(self._stores) <= self._queue_depth

    def close(self) -> None:
        """Finish the transfers under way, then free all resources."""
        self._cleaner.stop()
        while not self._device.is_idle:
            self._device.wait()
            self._device.poll()
        self._device.close()
        try:
            self._log.close()
        except OSError as error:
            log.error("%s", describe(error, self._folder.path))
            self._folder.abandon()
            return
        self._folder.close()

    def _adopt(self, recovered: Recovered) -> None:
        for block in recovered.blocks:
            self._blocks.add(block)
        self._counters.corrupt += recovered.num_corrupt
        self._log.note_direct(recovered.direct)
        self._log.adopt(recovered.segments, recovered.last_sequence)

    def _step(self) -> None:
        self._cleaner.step(loads_under_way=bool(self._loads))

    def _may_store(self, num_bytes: int) -> bool:
        if not 0 < num_bytes <= MAX_BLOCK_BYTES or not self._log.fits(record_bytes(num_bytes)):
            if not self._too_large:
                size, budget = format_size(num_bytes), format_size(self._log.capacity_bytes)
                self._too_large = f"a block of {size} does not fit into a budget of {budget}"
                log.error("%s: give the SSD tier more", self._too_large)
            return False
        if not self._log.may_try or len(self._stores) >= self._max_stores:
            return False
        return len(self._loads) + len(self._stores) < self._queue_depth

    def _forget(self, block: LogBlock) -> None:
        self._blocks.remove(block)
        self._log.kill(block)

    def _end_store(self, store: Store, result: int) -> None:
        del self._stores[store.ticket]
        block = store.block
        done = result == block.record_bytes
        if done:
            block.ready = True
            self._blocks.touch(block)
            self._counters.stores += 1
            self._counters.stored_bytes += block.num_bytes
            self._log.recover()
        else:
            self._counters.failures += 1
            self._forget(block)
            self._log.cover(block.segment, block.offset, block.record_bytes)
            self._log.fail(block.segment, result)
        self._blocks.end_use(block)
        now_s = self._now()
        self._counters.store_speed.end(now_s, block.num_bytes if done else 0)
        outcome = TierOutcome.DONE if done else TierOutcome.FAILED
        self._complete(store.ticket, outcome, block, now_s - store.began_s)

    def _end_load(self, load: SegmentLoad, outcome: TierOutcome) -> None:
        del self._loads[load.ticket]
        block = load.block
        if outcome is TierOutcome.DONE:
            self._counters.loads += 1
            self._counters.loaded_bytes += block.num_bytes
        elif outcome is TierOutcome.CORRUPT:
            self._counters.corrupt += 1
            if self._blocks.get(block.key) is block:
                self._forget(block)
        else:
            self._counters.failures += 1
        self._blocks.end_use(block)
        now_s = self._now()
        num_bytes = block.num_bytes if outcome is TierOutcome.DONE else 0
        self._counters.load_speed.end(now_s, num_bytes)
        self._complete(load.ticket, outcome, block, now_s - load.began_s)

    def _complete(self, ticket: int, outcome: TierOutcome, block: LogBlock, seconds: float) -> None:
        self._ended.append(Completion(ticket, outcome, block.num_bytes, seconds))

    def _report_if_error(self, result: object) -> None:
        if isinstance(result, OSError):
            self._log.report(result)
