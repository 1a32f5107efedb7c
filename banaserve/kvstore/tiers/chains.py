"""Eviction order of a tier: children before parents, least recently used first. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from banaserve.kvstore.index.eviction import Parents


class ChainedBlock:
    """Entry of a block in ``ChainedBlocks``; subclasses add further attributes.

    Attributes:
        key: Key of the block.
        parent: Key of the block before it in its chain; None for the first.
        num_users: Number of reads and writes under way; a block in use is never a victim.
    """

    __slots__ = ("key", "last_used", "num_users", "parent", "queued", "serial")

    def __init__(self, key: bytes, parent: bytes | None) -> None:
        self.key = key
        self.parent = parent
        self.num_users = 0
        self.last_used = 0
        self.serial = 0
        self.queued = False


BlockT = TypeVar("BlockT", bound=ChainedBlock)


class ChainedBlocks(Generic[BlockT]):
    """Blocks by key, and the order of their eviction. Every operation costs O(log n)."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, BlockT] = {}
        self._parents = Parents(self._blocks)
        # Every possible victim is queued exactly once. A block that was used again, or was removed,
        # is corrected when it reaches the front.
        self._queue: list[tuple[int, int, BlockT]] = []
        self._tick = 0
        self._last_serial = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockT]:
        return iter(self._blocks.values())

    def get(self, key: bytes) -> BlockT | None:
        """Return the block of ``key``; None if there is none."""
        return self._blocks.get(key)

    def add(self, block: BlockT) -> None:
        """Add a block as the most recently used one. Its key must be new."""
        assert block.key not in self._blocks
        if block.parent is not None and self._parents.closes_a_cycle(block.key, block.parent):
            block.parent = None
        self._blocks[block.key] = block
        self._last_serial += 1
        block.serial = self._last_serial
        self._parents.link(block.parent)
        self.touch(block)
        self._enqueue_if_evictable(block)

    def touch(self, block: BlockT) -> None:
        """Make a block the most recently used one."""
        self._tick += 1
        block.last_used = self._tick

    def begin_use(self, block: BlockT) -> None:
        """Keep a block from being a victim until the matching ``end_use``."""
        block.num_users += 1

    def end_use(self, block: BlockT) -> None:
        """End one use; the block may have been removed meanwhile."""
        block.num_users -= 1
        if self._blocks.get(block.key) is block:
            self._enqueue_if_evictable(block)

    def remove(self, block: BlockT) -> None:
        """Remove a block, even if it has children or is in use."""
        del self._blocks[block.key]
        if (parent := self._parents.unlink(block.parent)) is not None:
            self._enqueue_if_evictable(parent)

    def next_victim(self) -> BlockT | None:
        """Return the next block to evict; None if each is in use or has a descendant in use."""
        while self._queue:
            last_used, _, block = self._queue[0]
            here = self._blocks.get(block.key) is block
            if here and block.last_used == last_used and self._is_evictable(block):
                return block
            heappop(self._queue)
            block.queued = False
            if here:
                self._enqueue_if_evictable(block)
        return None

    def pop_victim(self) -> BlockT | None:
        """Remove and return the next block to evict; None as for ``next_victim``."""
        block = self.next_victim()
        if block is not None:
            heappop(self._queue)
            block.queued = False
            self.remove(block)
        return block

    def check(self) -> None:
        """Assert the invariants that hold between two operations."""
        blocks = self._blocks
        assert all(block.key == key for key, block in blocks.items())
        parents = [block.parent for block in blocks.values() if block.parent is not None]
        assert Counter(parents) == self._parents.num_children
        assert all(block.num_users >= 0 for block in blocks.values())
        queued = [block for _, _, block in self._queue]
        assert all(block.queued for block in queued)
        assert len(queued) == len(set(map(id, queued)))
        assert all(block.queued for block in blocks.values() if self._is_evictable(block))

    def _is_evictable(self, block: BlockT) -> bool:
        return not block.num_users and block.key not in self._parents.num_children

    def _enqueue_if_evictable(self, block: BlockT) -> None:
        if not block.queued and self._is_evictable(block):
            block.queued = True
            heappush(self._queue, (block.last_used, block.serial, block))
