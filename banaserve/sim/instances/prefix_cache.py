"""Cache of prefixes: the global store, or one engine's own prefix cache."""

from __future__ import annotations

from collections import OrderedDict

HASH_BLOCK_TOKENS = 512
"""Number of tokens that one hash id of a Mooncake trace stands for."""


class SimPrefixCache:
    """Blocks of prompts by id, evicting the least recently used first.

    An id names a block and all blocks before it, so a prefix is cached as far as its ids are found.
    """

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens // HASH_BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.hit_tokens = 0
        self.asked_tokens = 0

    def lookup(self, hash_ids: tuple[int, ...], prompt_tokens: int) -> int:
        """Return how many tokens of the prompt are cached; at least one is always left."""
        found = 0
        for block in hash_ids:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            found += 1
        tokens = min(found * HASH_BLOCK_TOKENS, prompt_tokens - 1)
        self.hit_tokens += tokens
        self.asked_tokens += prompt_tokens
        return tokens

    def clear(self) -> None:
        """Forget all blocks, as when the machine dies."""
        self._blocks.clear()

    def insert(self, hash_ids: tuple[int, ...]) -> None:
        """Keep the blocks of a computed prompt; children are evicted before their parents."""
        for block in reversed(hash_ids):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
