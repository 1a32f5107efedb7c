"""Triton implementation of the kernels' interface."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from banaserve.kernels.checks import check_attention, check_blocks, check_parts
from banaserve.kernels.interface import (
    FLOAT_DTYPES,
    HEAD_SIZES,
    Batch,
    BlockCopies,
    Heads,
    PartialAttention,
)
from banaserve.kernels.tiling import Tiling
from banaserve.kernels.triton.attention_op import partial_attention
from banaserve.kernels.triton.merge_op import merge_parts
from banaserve.kernels.triton.pack_op import pack_blocks, unpack_blocks


class TritonKernels:
    """Kernels in Triton. They only launch: nothing is read on the host or waits for the GPU.

    Args:
        num_splits: Number of splits of each range of partial attention; 0 to choose by the batch.
        tiling: Tiling of partial attention; None to choose by the batch.
    """

    name = "triton"
    head_sizes: tuple[int, ...] = HEAD_SIZES
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES

    def __init__(self, num_splits: int = 0, tiling: Tiling | None = None) -> None:
        self._num_splits = num_splits
        self._tiling = tiling

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
        """See ``interface.Kernels``."""
        check_attention(query, key_cache, value_cache, batch, heads)
        tiling = self._tiling
        if tiling and tiling.rows < heads.group_size:
            raise ValueError(f"tiling: {tiling.rows} rows; allowed: {heads.group_size} or more")
        output, lse = partial_attention(
            query,
            key_cache,
            value_cache,
            batch.block_table,
            batch.query_start,
            batch.query_position,
            batch.range_start,
            batch.range_end,
            heads.kv_heads,
            heads.groups,
            heads.group_size,
            batch.max_range_tokens,
            scale,
            causal,
            self._num_splits,
            tiling and [tiling.rows, tiling.keys, tiling.num_warps, tiling.num_stages],
        )
        return PartialAttention(output, lse)

    def merge(self, parts: Sequence[PartialAttention]) -> PartialAttention:
        """See ``interface.Kernels``."""
        check_parts(parts)
        return PartialAttention(
            *merge_parts([part.output for part in parts], [part.lse for part in parts])
        )

    def pack_blocks(self, copies: BlockCopies) -> None:
        """See ``interface.Kernels``."""
        check_blocks(copies)
        pack_blocks(copies.cache, copies.block_ids, list(copies.kv_heads), copies.pages)

    def unpack_blocks(self, copies: BlockCopies) -> None:
        """See ``interface.Kernels``."""
        check_blocks(copies)
        unpack_blocks(copies.cache, copies.block_ids, list(copies.kv_heads), copies.pages)
