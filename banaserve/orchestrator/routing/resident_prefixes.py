"""Prompts whose KV lies in an instance's own cache, as far as a router can tell. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from banaserve.types import InstanceId


class ResidentPrefixes:
    """Blocks of tokens by instance, least recently used out first.

    A block is known by all tokens before it, too, so a prefix lies somewhere as far as its blocks
    are found there. It is a guess: engines throw away what they need room for and do not say so.

    Args:
        block_tokens: Of the engines' KV blocks.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[InstanceId, OrderedDict[int, None]] = {}

    def add(
        self, instance: InstanceId, root: Hashable, tokens: Sequence[int], capacity_tokens: int
    ) -> None:
        """The KV of ``tokens`` has been computed, or brought, to ``instance``.

        Args:
            root: What sets equal tokens apart: a tenant's salt, an adapter.
            capacity_tokens: Of the instance's cache.
        """
        held = self._blocks.setdefault(instance, OrderedDict())
        for block in reversed([*self._chain(root, tokens)]):  # children go before their parents
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity_tokens // self._block_tokens:
            held.popitem(last=False)

    def found(self, root: Hashable, tokens: Sequence[int]) -> dict[InstanceId, int]:
        """Returns how many of ``tokens`` lie where; whoever has none is left out."""
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
        """What lay in ``instance`` is lost; without one, everywhere."""
        if instance is None:
            self._blocks.clear()
        else:
            self._blocks.pop(instance, None)

    def _chain(self, root: Hashable, tokens: Sequence[int]) -> Iterator[int]:
        """Returns a number for each whole block of ``tokens`` with all that is before it.

        Equal numbers for others would cost time and no correctness: engines compare for themselves.
        """
        size = self._block_tokens
        key = hash(root)
        for first in range(0, len(tokens) - size + 1, size):
            key = hash((key, *tokens[first : first + size]))
            yield key
