"""Blocks that one engine holds in its cache, and the keys that prompts share with them.

An engine's own block hashes cannot be computed here, but its events carry the tokens of each block
and the hash of the block before it. A block therefore gets a key of this module, from the key of
its parent, its tokens and its extra keys; the same function gives the keys of a prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeAlias

KEY_BYTES = 8
MAX_BLOCKS = 1 << 19
"""Maximum number of blocks known of one engine: 8 million tokens in blocks of 16, about 150 MB."""
_MAX_MEDIA = 8

BlockHash: TypeAlias = bytes | int
"""Hash of a block in an engine's events."""
ExtraKeys: TypeAlias = Sequence[Any] | None
"""Further identity of a block besides its tokens: adapter, images, salt of the cache."""


class ViewFault(StrEnum):
    """Reason for which an event was not taken into a view."""

    UNKNOWN_PARENT = "unknown_parents"
    WRONG_SIZE = "wrong_sizes"
    TOO_MANY_BLOCKS = "too_many_blocks"


def block_keys(
    tokens: Sequence[int],
    block_size: int,
    extras: Sequence[ExtraKeys] = (),
    parent: bytes = b"",
) -> list[bytes]:
    """Return the key of each whole block of ``tokens``; equal keys mean equal prefixes.

    Args:
        extras: Extra keys of each block; blocks after the last entry have none.
        parent: Key of the block before the first one; empty at the start of a prompt.

    Raises:
        OverflowError: A token is not a 32-bit integer.
    """
    data, size = array("i", tokens).tobytes(), 4 * block_size
    keys = []
    for number in range(len(tokens) // block_size):
        extra = extras[number] if number < len(extras) else None
        own = data[number * size : (number + 1) * size]
        identity = parent + own + repr(list(extra)).encode() if extra else parent + own
        parent = blake2b(identity, digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


class CacheView:
    """Blocks of one engine. Bounded in memory, whatever the events.

    Attributes:
        is_whole: True if every block that the engine holds is in the view.
        block_size: Number of tokens of a block; 0 before the first stored block.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self.clear(is_whole=False)

    def __len__(self) -> int:
        return len(self._held)

    def clear(self, is_whole: bool) -> None:
        """Forget all blocks: the engine holds none (``is_whole``), or what it holds is unknown."""
        self.is_whole = is_whole
        self.block_size = 0
        self._keys: dict[BlockHash, bytes] = {}
        self._held: dict[bytes, int] = {}
        self._media: dict[str, int] = {}

    def stored(
        self,
        hashes: Sequence[BlockHash],
        parent: BlockHash | None,
        tokens: Sequence[int],
        block_size: int,
        extras: Sequence[ExtraKeys],
        medium: str,
    ) -> ViewFault | None:
        """Add consecutive blocks, or say why they are left out.

        Blocks beyond the bound make the view empty and no longer whole.

        Args:
            parent: Hash of the block before the first one; None at the start of a prompt.
            tokens: Tokens of all blocks, ``len(hashes) * block_size``.
            extras: Extra keys of each block.
            medium: Name of the memory that holds them; a block may be in several.

        Raises:
            OverflowError: A token is not a 32-bit integer.
        """
        if block_size < 1 or len(tokens) != block_size * len(hashes):
            return ViewFault.WRONG_SIZE
        if self.block_size not in (0, block_size):
            return ViewFault.WRONG_SIZE
        before = b"" if parent is None else self._keys.get(parent)
        if before is None:
            return ViewFault.UNKNOWN_PARENT
        if len(self._keys) + len(hashes) > self._max_blocks:
            self.clear(is_whole=False)
            return ViewFault.TOO_MANY_BLOCKS
        self.block_size = block_size
        bit = self._bit(medium)
        for each, key in zip(hashes, block_keys(tokens, block_size, extras, before), strict=True):
            former = self._keys.get(each, key)
            if former != key:
                self._held.pop(former, None)
            self._keys[each] = key
            self._held[key] = self._held.get(key, 0) | bit
        return None

    def removed(self, hashes: Sequence[BlockHash], medium: str) -> None:
        """Remove blocks from one memory; unknown ones are not in the view anyway."""
        bit = self._bit(medium)
        for each in hashes:
            if (key := self._keys.get(each)) is None:
                continue
            if left := self._held.get(key, 0) & ~bit:
                self._held[key] = left
            else:
                self._held.pop(key, None)
                del self._keys[each]

    def num_held(self, keys: Sequence[bytes], coming: set[bytes] | dict[bytes, int]) -> int:
        """Return how many leading blocks of a prompt are held, or are ``coming``."""
        for number, key in enumerate(keys):
            if key not in self._held and key not in coming:
                return number
        return len(keys)

    def check(self) -> None:
        """Assert that the view is within its bound, and that each held block can be removed."""
        assert len(self._keys) <= self._max_blocks
        assert self._held.keys() <= set(self._keys.values())
        assert all(self._held.values())

    def _bit(self, medium: str) -> int:
        """Return the bit of a memory; those beyond the first few share one."""
        if medium not in self._media and len(self._media) == _MAX_MEDIA:
            return 1 << _MAX_MEDIA
        return self._media.setdefault(medium, 1 << len(self._media))
