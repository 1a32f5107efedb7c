"""Prefixes whose KV is in an instance's own cache, as far as a router can know. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from banaserve.base.types import InstanceId


class ResidentPrefixes:
    """Blocks of tokens by instance; the least recently used block is evicted first.

    A block is identified by its tokens and all tokens before it, so that the blocks found at an
    instance show how much of a prefix it has. This is an estimate: engines evict blocks without
    reporting it.

    Args:
        block_tokens: Number of tokens of the engines' KV blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[InstanceId, OrderedDict[int, None]] = {}

    def add(
        self, instance: InstanceId, root: Hashable, tokens: Sequence[int], capacity_tokens: int
    ) -> None:
        """Record that the KV of ``tokens`` has been computed at, or fetched to, ``instance``.

        Args:
            root: Key that separates equal tokens: a tenant's salt, an adapter.
            capacity_tokens: Capacity of the instance's cache in tokens.
        """
        held = self._blocks.setdefault(instance, OrderedDict())
        for block in reversed([*self._chain(root, tokens)]):  # children are evicted before parents
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity_tokens // self._block_tokens:
            held.popitem(last=False)

    def found(self, root: Hashable, tokens: Sequence[int]) -> dict[InstanceId, int]:
        """Return the number of ``tokens`` in the cache of each instance that has any."""
        held = {instance: blocks for instance, blocks in self._blocks.items() if blocks}
        found: dict[InstanceId, int] = {}
        if not held:
            return found
        for number, block in enumerate(self._chain(root, tokens), start=1):
            held = {instance: blocks for instance, blocks in held.items() if block in blocks}
            if not held:
                break
            for instance in held:
                found[instance] = number * self._block_tokens
        return found

    def forget(self, instance: InstanceId | None = None) -> None:
        """Forget the blocks of ``instance``, or of all instances if it is None."""
        if instance is None:
            self._blocks.clear()
        else:
            self._blocks.pop(instance, None)

    def _chain(self, root: Hashable, tokens: Sequence[int]) -> Iterator[int]:
        """Yield a hash for each whole block of ``tokens`` and all tokens before it.

        A collision would cost time but not correctness: engines compare tokens themselves.
        """
        size = self._block_tokens
        key = hash(root)
        for first in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[first : first + size]))
            yield key
