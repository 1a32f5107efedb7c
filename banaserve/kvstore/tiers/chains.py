"""Eviction order of a tier: children before parents, least recently used first. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from banaserve.kvstore.index.eviction import EvictionQueue, Parents


@dataclass(eq=False, slots=True)
class ChainedBlock:
    """Entry of a block in ``ChainedBlocks``; subclasses add further attributes.

    Attributes:
        parent: Key of the block before it in its chain; None for the first.
        num_users: Number of reads and writes under way; a block in use is never a victim.
    """

    key: bytes
    parent: bytes | None
    num_users: int = field(default=0, init=False)
    last_used: int = field(default=0, init=False)
    serial: int = field(default=0, init=False)


BlockT = TypeVar("BlockT", bound=ChainedBlock)


class ChainedBlocks(Generic[BlockT]):
    """Blocks by key, and the order of their eviction. Every operation costs O(log n)."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, BlockT] = {}
        self._parents = Parents(self._blocks)
        self._queue: EvictionQueue[BlockT] = EvictionQueue(self._is_evictable)
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
        self._queue.offer(block)

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
            self._queue.offer(block)

    def remove(self, block: BlockT) -> None:
        """Remove a block, even if it has children or is in use."""
        del self._blocks[block.key]
        self._queue.forget(block)
        if (parent := self._parents.unlink(block.parent)) is not None:
            self._queue.offer(parent)

    def pop_victim(self) -> BlockT | None:
        """Remove and return the next block; None if each is in use or has a descendant in use."""
        block = self._queue.pop()
        if block is not None:
            self.remove(block)
        return block

    def check(self) -> None:
        """Assert the invariants that hold between two operations."""
        blocks = self._blocks
        assert all(block.key == key for key, block in blocks.items())
        parents = [block.parent for block in blocks.values() if block.parent is not None]
        assert Counter(parents) == self._parents.num_children
        assert all(block.num_users >= 0 for block in blocks.values())
        self._queue.check(blocks, blocks.values())

    def _is_evictable(self, block: BlockT) -> bool:
        return not block.num_users and block.key not in self._parents.num_children
