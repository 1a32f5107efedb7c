"""KV blocks on a local disk, a file each, that survive a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
from banaserve.kvstore.tiers.ssd.files import BlockFiles, DiskBlock, Workers
from banaserve.kvstore.tiers.ssd.folder import Folder, describe
from banaserve.kvstore.tiers.ssd.record import MAX_BLOCK_BYTES, PAGE_BYTES, record_bytes
from banaserve.kvstore.tiers.ssd.scan import Recovered, recover

DEFAULT_QUEUE_DEPTH = 16
MIN_CAPACITY_BYTES = 64 * PAGE_BYTES
MAX_QUEUE_DEPTH = 256
# Maximum for each call: an eviction takes microseconds, and an event loop waits for the call.
MAX_EVICTIONS = 64
log = logging.getLogger(__name__)


class SsdTier:
    """Tier on a local disk; see ``StoreTier``.

    A block that is being written is PENDING. A block that was evicted may be found again after a
    restart, as long as its file was neither reused nor deleted; a cleared block is not found.

    Args:
        folder: Folder of the files; created if it does not exist. One process at a time uses it.
        capacity_bytes: Budget: maximum total size of the files.
        queue_depth: Maximum number of loads and stores at a time; stores get at most three
            quarters of it.

    Raises:
        UserError: The folder cannot be used, or an argument is invalid; one line says why.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        queue_depth: int = DEFAULT_QUEUE_DEPTH,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        check_capacity(capacity_bytes)
        if not 1 <= queue_depth <= MAX_QUEUE_DEPTH:
            raise UserError(f"a queue depth of {queue_depth} is not within 1 to {MAX_QUEUE_DEPTH}")
        self._now = now
        self._queue_depth = queue_depth
        self._max_stores = max(1, queue_depth * 3 // 4)
        self._counters = TierCounters()
        self._blocks: ChainedBlocks[DiskBlock] = ChainedBlocks()
        self._folder = Folder(folder)
        try:
            recovered = recover(self._folder, now)
        except OSError as error:
            self._folder.close()
            raise UserError(describe(error, folder)) from error
        # One more, for deletions.
        self._workers = Workers(queue_depth + 1)
        self._files = BlockFiles(self._folder, self._workers, capacity_bytes, now)
        self._adopt(recovered)
        self._loads: dict[int, DiskBlock] = {}
        self._stores: dict[int, DiskBlock] = {}
        self._ended: list[Completion] = []
        self._last_ticket = 0
        self._too_large = ""
        self._keeps = ""
        self._step()

    @property
    def name(self) -> str:
        return "ssd"

    @property
    def fd(self) -> int:
        return self._workers.fd

    @property
    def direct(self) -> bool:
        """Return whether file I/O bypasses the page cache; some file systems refuse this."""
        return self._files.direct

    @property
    def is_idle(self) -> bool:
        """Return whether no load, store or deletion is under way."""
        return self._workers.is_idle and self._files.is_tidy

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
        if not self._make_room(record_bytes(source.nbytes)):
            self._files.tidy()
            return None
        self._last_sequence += 1
        entry = DiskBlock(block.key, block.parent, source.nbytes, self._last_sequence)
        self._blocks.add(entry)
        ticket = self._begin(entry, self._stores)
        self._counters.store_speed.begin(self._now())
        self._files.write(entry, source, lambda error: self._end_store(ticket, error))
        return ticket

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block; see ``StoreTier``."""
        block = self._blocks.get(key)
        if block is None or not block.ready or block.num_bytes != target.nbytes:
            self._counters.missing += 1
            return None
        if len(self._loads) + len(self._stores) >= self._queue_depth:
            return None
        self._blocks.touch(block)
        ticket = self._begin(block, self._loads)
        self._counters.load_speed.begin(self._now())
        self._files.read(block, target, lambda outcome: self._end_load(ticket, outcome))
        return ticket

    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call."""
        self._workers.poll()
        self._step()
        ended, self._ended = self._ended, []
        return ended

    def clear(self) -> int:
        """Forget all blocks not in use; return their number. A restart finds no old block."""
        idle = [block for block in self._blocks if not block.num_users]
        for block in idle:
            self._forget(block)
        try:
            self._folder.write_cleared(self._last_sequence)
            self._keeps = ""
        except OSError as error:
            self._files.report(error)
            self._keeps = "blocks that a restart will find"
        self._workers.submit(self._folder.sync, self._report_if_error)
        self._step()
        return len(idle)

    def stats(self) -> TierStats:
        """Return the current counters and gauges."""
        return self._counters.stats(
            self.name,
            problem=self._files.problem or self._too_large,
            capacity_bytes=self._files.capacity_bytes,
            used_bytes=self._files.used_bytes,
            num_blocks=len(self._blocks) - len(self._stores),
            in_flight=len(self._loads) + len(self._stores),
            keeps=self._keeps,
        )

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        self._blocks.check()
        assert all(block.ready or block.num_users for block in self._blocks)
        num_users = len(self._loads) + len(self._stores)
        assert sum(block.num_users for block in self._blocks) <= num_users
        if self.is_idle and not self._files.problem:
            used_bytes = sum(block.file_bytes for block in self._blocks)
            assert self._files.used_bytes == used_bytes, "a file belongs to no block"
        assert len(self._loads) + len(self._stores) <= self._queue_depth

    def close(self) -> None:
        """Finish the transfers under way, then free all resources."""
        self._workers.finish()
        self._folder.close()

    def _adopt(self, recovered: Recovered) -> None:
        for block in recovered.blocks:
            self._blocks.add(block)
        self._counters.corrupt += recovered.num_corrupt
        self._last_sequence = recovered.last_sequence
        self._files.adopt(recovered.blocks, recovered.dead)

    def _step(self) -> None:
        self._make_room(0)
        self._files.tidy()

    def _make_room(self, num_bytes: int) -> bool:
        """Evict blocks until a file of this size fits; False if it does not, at least for now."""
        for _ in range(MAX_EVICTIONS):
            if self._files.has_room(num_bytes):
                return True
            block = self._blocks.pop_victim()
            if block is None:
                return False
            self._files.drop(block)
            self._counters.evictions += 1
        self._workers.wake()
        return self._files.has_room(num_bytes)

    def _may_store(self, num_bytes: int) -> bool:
        capacity_bytes = self._files.capacity_bytes
        if not 0 < num_bytes <= MAX_BLOCK_BYTES or record_bytes(num_bytes) > capacity_bytes:
            if not self._too_large:
                size, budget = format_size(num_bytes), format_size(capacity_bytes)
                self._too_large = f"a block of {size} does not fit into a budget of {budget}"
                log.error("%s: give the SSD tier more", self._too_large)
            return False
        if not self._files.may_try or len(self._stores) >= self._max_stores:
            return False
        return len(self._loads) + len(self._stores) < self._queue_depth

    def _begin(self, block: DiskBlock, transfers: dict[int, DiskBlock]) -> int:
        self._blocks.begin_use(block)
        self._last_ticket += 1
        transfers[self._last_ticket] = block
        return self._last_ticket

    def _forget(self, block: DiskBlock) -> None:
        self._blocks.remove(block)
        if not block.num_users:
            self._files.drop(block)

    def _end_use(self, block: DiskBlock) -> None:
        self._blocks.end_use(block)
        if not block.num_users and self._blocks.get(block.key) is not block:
            self._files.drop(block)

    def _end_store(self, ticket: int, error: OSError | None) -> None:
        block, outcome = self._stores.pop(ticket), TierOutcome.FAILED
        if error is None:
            outcome = TierOutcome.DONE
            block.ready = True
            self._blocks.touch(block)
            self._files.clear_problem()
        else:
            self._blocks.remove(block)
            self._files.report(error)
        self._blocks.end_use(block)
        self._counters.end_store(self._now(), block.num_bytes, outcome)
        self._ended.append(Completion(ticket, outcome))

    def _end_load(self, ticket: int, outcome: TierOutcome) -> None:
        block = self._loads.pop(ticket)
        if outcome is TierOutcome.CORRUPT and self._blocks.get(block.key) is block:
            self._forget(block)
        self._end_use(block)
        self._counters.end_load(self._now(), block.num_bytes, outcome)
        self._ended.append(Completion(ticket, outcome))

    def _report_if_error(self, result: object) -> None:
        if isinstance(result, OSError):
            self._files.report(result)


def check_capacity(capacity_bytes: int) -> None:
    """Raise UserError if the tier cannot work within this budget."""
    if capacity_bytes < MIN_CAPACITY_BYTES:
        least, given = format_size(MIN_CAPACITY_BYTES), format_size(max(0, capacity_bytes))
        raise UserError(f"the SSD tier needs at least {least}, not {given}")
