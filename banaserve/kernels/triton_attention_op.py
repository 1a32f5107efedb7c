"""``banaserve::partial_attention``: the Triton kernels as one operator that torch can trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from banaserve.kernels.tiling import Tiling, choose_num_splits, choose_tiling, next_power_of_2
from banaserve.kernels.triton_attention import LOG2_E, attend_parts
from banaserve.kernels.triton_launch import IS_INTERPRETED, check_device, index_tensor, on_device
from banaserve.kernels.triton_merge_op import launch_merge_stacked

_SCHEMA = (
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start, "
    "Tensor query_position, Tensor range_start, Tensor range_end, int[] kv_heads, "
    "int[] query_groups, int group_size, int max_range_tokens, float scale, bool causal, "
    "int num_splits=0, int[]? tiling=None) -> (Tensor, Tensor)"
)


@torch.library.custom_op("banaserve::partial_attention", mutates_args=(), schema=_SCHEMA)
def partial_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_position: torch.Tensor,
    range_start: torch.Tensor,
    range_end: torch.Tensor,
    kv_heads: Sequence[int],
    query_groups: Sequence[int],
    group_size: int,
    max_range_tokens: int,
    scale: float,
    causal: bool,
    num_splits: int = 0,
    tiling: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``interface.Kernels.partial_attention``, whose checks the caller has made.

    Args:
        num_splits: Of each range; 0 chooses.
        tiling: Fields of a ``Tiling``; None chooses.

    Returns:
        ``[num_tokens, len(kv_heads) * group_size, head_size]`` of the query's dtype and ``lse``
        ``[num_tokens, len(kv_heads) * group_size]`` float32.
    """
    check_device("query", query)
    num_tokens, _, head_size = query.shape
    num_seqs, num_heads = block_table.shape[0], len(kv_heads) * group_size
    output = query.new_empty(num_tokens, num_heads, head_size)
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    if not num_tokens or not num_seqs:
        return output.zero_(), lse.fill_(float("-inf"))
    tiles = (
        Tiling(*tiling)
        if tiling
        else choose_tiling(num_tokens, num_seqs, group_size, head_size, query.element_size())
    )
    num_splits = num_splits or choose_num_splits(
        num_tokens,
        num_seqs,
        len(kv_heads),
        group_size,
        tiles.rows,
        max_range_tokens or block_table.shape[1] * key_cache.shape[1],
        _num_multiprocessors(query.device),
    )
    parts, lses = output[None], lse[None]
    if num_splits > 1:
        parts = query.new_empty(num_splits, *output.shape, dtype=torch.float32)
        lses = query.new_empty(num_splits, *lse.shape, dtype=torch.float32)
    grid = (num_tokens // (tiles.rows // group_size) + num_seqs, len(kv_heads), num_splits)
    with on_device(query):
        attend_parts[grid](
            query,
            key_cache,
            value_cache,
            block_table,
            query_start,
            query_position,
            range_start,
            range_end,
            index_tensor(tuple(kv_heads), query.device),
            index_tensor(tuple(query_groups), query.device),
            parts,
            lses,
            scale * LOG2_E,
            num_seqs,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_table.stride(0),
            *parts.stride()[:2],
            *lses.stride()[:2],
            BLOCK_SIZE=key_cache.shape[1],
            GROUP_SIZE=group_size,
            HEAD_SIZE=head_size,
            HEAD_PADDED=next_power_of_2(head_size),
            TILE_ROWS=tiles.rows,
            TILE_KEYS=tiles.keys,
            CAUSAL=causal,
            IS_SPLIT=num_splits > 1,
            UPCAST=IS_INTERPRETED,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        if num_splits > 1:
            launch_merge_stacked(parts, lses, output, lse)
    return output, lse


@partial_attention.register_fake
def _(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start: torch.Tensor,
    query_position: torch.Tensor,
    range_start: torch.Tensor,
    range_end: torch.Tensor,
    kv_heads: Sequence[int],
    query_groups: Sequence[int],
    group_size: int,
    max_range_tokens: int,
    scale: float,
    causal: bool,
    num_splits: int = 0,
    tiling: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (query.shape[0], len(kv_heads) * group_size)
    return query.new_empty(*shape, query.shape[2]), query.new_empty(shape, dtype=torch.float32)


@functools.lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
