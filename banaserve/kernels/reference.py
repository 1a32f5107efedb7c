"""Reference kernels in float64, which define the results of all kernels, regardless of speed."""

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


class ReferenceKernels:
    """Kernels of torch operations on any device. They wait for a GPU to read lengths on the host.

    Args:
        compute_dtype: Type of all arithmetic; float32 is faster where float64 is not needed.
        result_dtype: Type of the outputs; None for the query's type. Others are for comparisons.
    """

    name = "reference"
    head_sizes: tuple[int, ...] = HEAD_SIZES
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES

    def __init__(
        self,
        compute_dtype: torch.dtype = torch.float64,
        result_dtype: torch.dtype | None = None,
    ) -> None:
        self._compute_dtype = compute_dtype
        self._result_dtype = result_dtype

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
        """Compute corrected BanaServe Eq. 6 to 9: softmax of ``scale * q k`` over the range."""
        check_attention(query, key_cache, value_cache, batch, heads)
        shape = (query.shape[0], heads.num_query_heads, query.shape[2])
        output = torch.zeros(shape, dtype=self._compute_dtype, device=query.device)
        lse = torch.full(shape[:2], float("-inf"), dtype=self._compute_dtype, device=query.device)
        asking = [g * heads.group_size + i for g in heads.groups for i in range(heads.group_size)]
        seen = zip(
            batch.query_start.tolist()[:-1],
            batch.query_start.tolist()[1:],
            batch.query_position.tolist(),
            batch.range_start.tolist(),
            batch.range_end.tolist(),
            batch.block_table.long(),
            strict=True,
        )
        for first, end, position, low, high, blocks in seen:
            low, high = max(low, 0), min(high, position + end - first) if causal else high
            if high <= low or end <= first:
                continue
            tokens = torch.arange(low, high, device=query.device)
            size = key_cache.shape[1]
            where = blocks[tokens // size], tokens % size
            rows = query[first:end, asking].to(self._compute_dtype)
            key, value = (
                cache[where][:, list(heads.kv_heads)].to(self._compute_dtype)
                for cache in (key_cache, value_cache)
            )
            last = torch.arange(position, position + end - first, device=query.device)
            visible = tokens <= last[:, None] if causal else None
            output[first:end], lse[first:end] = _attend(rows, key, value, scale, visible)
        return PartialAttention(output.to(self._result_dtype or query.dtype), self._lse(lse))

    def merge(self, parts: Sequence[PartialAttention]) -> PartialAttention:
        """Compute corrected BanaServe Eq. 10: ``sum w_j O_j / sum w_j``, ``w_j = exp(lse_j)``."""
        check_parts(parts)
        lses = torch.stack([lse for _, lse in parts]).to(self._compute_dtype)
        outputs = torch.stack([output for output, _ in parts]).to(self._compute_dtype)
        empty = torch.isinf(lses)
        lses = lses.masked_fill(empty, float("-inf"))
        outputs = outputs.masked_fill(empty[..., None], 0.0)
        lse = torch.logsumexp(lses, 0)
        weights = torch.exp(lses - lse.masked_fill(torch.isinf(lse), 0.0))
        output = (weights[..., None] * outputs).sum(0)
        return PartialAttention(
            output.to(self._result_dtype or parts[0].output.dtype), self._lse(lse)
        )

    def pack_blocks(self, copies: BlockCopies) -> None:
        """See ``interface.Kernels``."""
        blocks, pages, heads = _bytes_of(copies)
        pages[:, heads] = blocks[copies.block_ids][:, heads]

    def unpack_blocks(self, copies: BlockCopies) -> None:
        """See ``interface.Kernels``."""
        blocks, pages, heads = _bytes_of(copies)
        for head in heads:
            blocks[copies.block_ids, head] = pages[:, head]

    def _lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse if self._result_dtype is torch.float64 else lse.float()


def _bytes_of(copies: BlockCopies) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the bytes of cache and pages, ``[n, num_kv_heads, block_size, bytes]``, and heads."""
    check_blocks(copies)
    blocks = copies.cache.view(torch.uint8)
    return (
        blocks,
        copies.pages.view(len(copies.block_ids), *blocks.shape[1:]),
        list(copies.kv_heads),
    )


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    visible: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and lse of one sequence.

    Args:
        query: ``[q, H, D]``.
        key: ``[k, K, D]``.
        value: ``[k, K, D]``.
        visible: ``[q, k]``, the keys that each query token sees; None for all.
    """
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse.masked_fill(torch.isinf(lse), 0.0)[..., None])
    return torch.einsum("hqk,khd->qhd", weights, value), lse.transpose(0, 1)
