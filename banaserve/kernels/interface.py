"""Interface of the kernels: attention over a part of the heads or of a sequence, and merging.

BanaServe Eq. 6 to 10 with their errors corrected: scores are ``q k / sqrt(d)``, separately for each
head; the row's maximum is subtracted before the exponential; parts of the *heads* are placed side
by side, and parts of a *sequence* are weighted by their log-sum-exp before they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

HEAD_SIZES = (64, 80, 96, 128, 256)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Batch:
    """Query tokens and the tokens of the KV cache that they see. All tensors int32, one device.

    A sequence's tokens are counted from the start of its block table: token ``p`` is in block
    ``block_table[s, p // block_size]``. A part of a sequence whose table begins later counts from
    there, as does its ``query_position``.

    Attributes:
        block_table: ``[num_seqs, max_blocks]``. Entries outside the chosen ranges are not read.
        query_start: ``[num_seqs + 1]``, ascending from 0: sequence ``s`` has the rows
            ``query_start[s]`` to ``query_start[s + 1]`` of the query.
        query_position: ``[num_seqs]``, the position of each sequence's first query token. With
            causal attention a token sees no position above its own. May be before or after the
            chosen range.
        range_start: ``[num_seqs]``, the first token of the KV cache that is seen.
        range_end: ``[num_seqs]``, one past the last; not above ``max_blocks * block_size``. An
            empty range is one with ``range_end <= range_start``.
        max_range_tokens: Upper bound of the lengths of the ranges, which determines the number of
            splits; 0 for the capacity of the block table.
    """

    block_table: torch.Tensor
    query_start: torch.Tensor
    query_position: torch.Tensor
    range_start: torch.Tensor
    range_end: torch.Tensor
    max_range_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Chosen KV heads, and the positions of their query heads in the query.

    Attributes:
        kv_heads: Indices of heads of the KV cache, without repeats, in the order of the output.
        group_size: Number of query heads per KV head.
        query_groups: Index of the group of ``group_size`` query heads for each of ``kv_heads``.
            Empty: group 0 belongs to the first head, 1 to the second and so on, as where the query
            holds no other heads.
    """

    kv_heads: tuple[int, ...]
    group_size: int
    query_groups: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """``query_groups``, written out where it is empty."""
        return self.query_groups or tuple(range(len(self.kv_heads)))

    @property
    def num_query_heads(self) -> int:
        """Number of query heads of the output."""
        return len(self.kv_heads) * self.group_size


class PartialAttention(NamedTuple):
    """Attention over a part of the keys: normalised, with the log-sum-exp that merging needs.

    Attributes:
        output: ``[num_tokens, num_heads, head_size]``, zero where no key was seen.
        lse: ``[num_tokens, num_heads]`` float32, the natural logarithm of the sum of the
            exponentials of all scaled scores; -inf where no key was seen.
    """

    output: torch.Tensor
    lse: torch.Tensor


class BlockCopies(NamedTuple):
    """Heads of a layer's KV blocks, and the pages that they are copied to or from.

    Attributes:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``; elements of 1, 2 or 4
            bytes, the last dimension contiguous.
        block_ids: Ids of the blocks, ``[n]`` int64, without repeats.
        kv_heads: Heads that are copied, without repeats.
        pages: Page of each block, ``[n, page_bytes]`` uint8, on the cache's device: head by head
            of the cache, each token's key before its value.
    """

    cache: torch.Tensor
    block_ids: torch.Tensor
    kv_heads: Sequence[int]
    pages: torch.Tensor


class Kernels(Protocol):
    """Implementation of all kernels.

    Attributes:
        name: ``triton``, ``flashinfer`` or ``reference``.
        head_sizes: Head sizes that attention supports.
        dtypes: Data types of queries, keys and values that attention supports.
    """

    @property
    def name(self) -> str: ...

    @property
    def head_sizes(self) -> tuple[int, ...]: ...

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]: ...

    def partial_attention(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: Batch,
        heads: Heads,
        scale: float,
        causal: bool = True,
    ) -> PartialAttention:
        """Compute attention of the chosen KV heads over the chosen ranges.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, fp16, bf16 or fp32.
            key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of the same dtype, any
                strides with contiguous heads: see ``layouts.key_value_views``.
            value_cache: Values, in the same form as ``key_cache``.
            scale: Factor of the scores, usually ``head_size ** -0.5``.
            causal: True if a token sees no position above its own.

        Returns:
            ``output`` in the query's dtype, its heads in the order of ``heads.kv_heads``. No value
            outside the chosen ranges has any influence, NaN included.

        Raises:
            ValueError: An argument is not supported; the text names it and what is allowed.
        """
        ...

    def merge(self, parts: Sequence[PartialAttention]) -> PartialAttention:
        """Merge parts of a sequence, as if the keys had never been split.

        Outputs and lse have the same shape and dtype in all parts. A part whose lse is -inf, or
        +inf, which some kernels return for an empty range, is ignored, whatever its output holds.
        """
        ...

    def pack_blocks(self, copies: BlockCopies) -> None:
        """Copy heads of KV blocks into pages; the bytes of other heads keep their values."""
        ...

    def unpack_blocks(self, copies: BlockCopies) -> None:
        """Copy heads of KV blocks out of pages: the reverse of ``pack_blocks``."""
        ...
