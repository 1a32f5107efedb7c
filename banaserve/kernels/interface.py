"""Interface of the kernels: attention over a part of the heads or of a sequence, and merging.

BanaServe Eq. 6 to 10 with their errors mended: scores are ``q k / sqrt(d)``, each head by itself;
the row's maximum is subtracted before the exponential; parts of the *heads* lie side by side, and
parts of a *sequence* are weighted by their log-sum-exp before they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from banaserve.kernels.layouts import KvLayout
from banaserve.kernels.slot_pages import SlotPages

HEAD_SIZES = (64, 80, 96, 128, 256)
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Batch:
    """Which tokens ask and which tokens of the KV cache they see. All tensors int32, one device.

    A sequence's tokens are counted in the block table's own terms: token ``p`` lies in block
    ``block_table[s, p // block_size]``. A part of a sequence whose table begins later counts from
    there, and its ``query_position`` too.

    Attributes:
        block_table: ``[num_seqs, max_blocks]``. Entries outside the chosen ranges are not read.
        query_start: ``[num_seqs + 1]``, ascending from 0: sequence ``s`` asks with the rows
            ``query_start[s]`` to ``query_start[s + 1]`` of the query.
        query_position: ``[num_seqs]``, the position of each sequence's first asking token. With
            causal attention a token sees no position above its own. May lie before or behind the
            chosen range.
        range_start: ``[num_seqs]``, the first token of the KV cache that is seen.
        range_end: ``[num_seqs]``, one behind the last; not above ``max_blocks * block_size``. An
            empty range is one with ``range_end <= range_start``.
        max_range_tokens: No range is longer. Decides into how many parts the work is split; 0 takes
            what the block table has room for.
    """

    block_table: torch.Tensor
    query_start: torch.Tensor
    query_position: torch.Tensor
    range_start: torch.Tensor
    range_end: torch.Tensor
    max_range_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Heads:
    """Which KV heads attend, and where their query heads stand.

    Attributes:
        kv_heads: Of the KV cache, without repeats, in the order of the output.
        group_size: Query heads for each KV head.
        query_groups: For each of ``kv_heads`` the group of ``group_size`` query heads that asks it.
            Empty: group 0 asks the first, 1 the second, as where the query holds nothing else.
    """

    kv_heads: tuple[int, ...]
    group_size: int
    query_groups: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """``query_groups``, spelled out."""
        return self.query_groups or tuple(range(len(self.kv_heads)))

    @property
    def num_query_heads(self) -> int:
        """Of the output."""
        return len(self.kv_heads) * self.group_size


class PartialAttention(NamedTuple):
    """Attention over a part of the keys: normalised, with what merging needs.

    Attributes:
        output: ``[num_tokens, num_heads, head_size]``, zero where no key was seen.
        lse: ``[num_tokens, num_heads]`` float32, the natural logarithm of the sum of the
            exponentials of all scaled scores; -inf where no key was seen.
    """

    output: torch.Tensor
    lse: torch.Tensor


class BlockCopies(NamedTuple):
    """Heads of KV blocks, and the slots beside them.

    Attributes:
        caches: One tensor for each of ``pages.layers``, as ``layout`` says, of equal shape and
            strides.
        layout: Of the caches.
        block_ids: ``[n]`` int64, without repeats.
        kv_heads: Which heads of the caches; the first stands beside ``pages.heads[0]``.
        slots: ``[num_slots, slot_bytes]`` uint8, on the caches' device.
        slot_ids: ``[n]`` int64, without repeats, for each block.
        pages: Where in a slot its heads lie.
    """

    caches: Sequence[torch.Tensor]
    layout: KvLayout
    block_ids: torch.Tensor
    kv_heads: Sequence[int]
    slots: torch.Tensor
    slot_ids: torch.Tensor
    pages: SlotPages


class Kernels(Protocol):
    """One way to compute all of this.

    Attributes:
        name: ``triton``, ``flashinfer`` or ``reference``.
    """

    @property
    def name(self) -> str: ...

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
        """Attention of the chosen KV heads over the chosen ranges.

        Args:
            query: ``[num_tokens, num_query_heads, head_size]``, fp16, bf16 or fp32.
            key_cache: ``[num_blocks, block_size, num_kv_heads, head_size]`` of the same dtype, any
                strides with contiguous heads: see ``layouts.key_value_views``.
            value_cache: As ``key_cache``.
            scale: Of the scores, as a rule ``head_size ** -0.5``.
            causal: Whether a token sees no position above its own.

        Returns:
            ``output`` in the query's dtype, its heads in the order of ``heads.kv_heads``. No value
            outside the chosen ranges has any influence, NaN included.

        Raises:
            ValueError: An argument is not taken; the text names it and what is allowed.
        """
        ...

    def merge(self, parts: Sequence[PartialAttention]) -> PartialAttention:
        """Parts of a sequence joined, as if the keys had never been split.

        Outputs and lse have the same shape and dtype in all parts. A part whose lse is -inf, or
        +inf as some kernels say for "saw nothing", counts for nothing, whatever its output holds.
        """
        ...

    def concat_heads(
        self, parts: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Heads computed apart, side by side.

        Args:
            parts: ``[num_tokens, len(groups[i]) * group_size, head_size]`` each.
            groups: For each part the KV heads that it holds, in its order. Together they are all
                KV heads, each once.

        Returns:
            ``[num_tokens, num_kv_heads * group_size, head_size]``.
        """
        ...

    def pack_blocks(self, copies: BlockCopies) -> None:
        """Copy heads of KV blocks into slots; other bytes of the slots keep their values."""
        ...

    def unpack_blocks(self, copies: BlockCopies) -> None:
        """Copy heads of KV blocks out of slots: ``pack_blocks`` the other way."""
        ...
