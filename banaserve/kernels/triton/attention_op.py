"""``banaserve::partial_attention``: the Triton kernels as one operator that torch can trace."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from banaserve.kernels.tiling import Tiling, choose_num_splits, choose_tiling, next_power_of_2
from banaserve.kernels.triton.attention import LOG2_E, attend_parts
from banaserve.kernels.triton.launch import IS_INTERPRETED, check_device, index_tensor, on_device
from banaserve.kernels.triton.merge_op import launch_merge_stacked

_SCHEMA = (
    "(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor query_start, "
    "Tensor query_position, Tensor range_start, Tensor range_end, int[] kv_heads, "
    "int[] query_groups, int group_size, int max_range_tokens, float scale, bool causal, "
    "int num_splits=0, int[]? tiling=None) -> (Tensor, Tensor)"
)

# Positions of these among the arguments.
_KV_HEADS, _GROUP_SIZE = 8, 10


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
    """Compute ``interface.Kernels.partial_attention`` of arguments that the caller has checked.

    Args:
        num_splits: Number of splits of each range; 0 to choose by the batch.
        tiling: Fields of a ``Tiling``; None to choose by the batch.

    Returns:
        ``[num_tokens, len(kv_heads) * group_size, head_size]`` of the query's dtype and ``lse``
        ``[num_tokens, len(kv_heads) * group_size]`` float32.
    """
    check_device("query", query)
    num_tokens, num_seqs = query.shape[0], block_table.shape[0]
    output, lse = _empty_part(query, len(kv_heads) * group_size)
    if not num_tokens or not num_seqs:
        return output.zero_(), lse.fill_(float("-inf"))
    sizes = (num_tokens, num_seqs, group_size)
    tiles = (
        Tiling(*tiling) if tiling else choose_tiling(*sizes, query.shape[2], query.element_size())
    )
    range_tokens = max_range_tokens or block_table.shape[1] * key_cache.shape[1]
    num_splits = num_splits or choose_num_splits(
        num_tokens, num_seqs, len(kv_heads), group_size, tiles.rows, range_tokens,
        _num_multiprocessors(query.device),
    )  # fmt: skip
    ranges = (block_table, query_start, query_position, range_start, range_end)
    heads = tuple(index_tensor(tuple(ids), query.device) for ids in (kv_heads, query_groups))
    parts, lses = output[None], lse[None]
    if num_splits > 1:
        parts = query.new_empty(num_splits, *output.shape, dtype=torch.float32)
        lses = query.new_empty(num_splits, *lse.shape, dtype=torch.float32)
    with on_device(query):
        _launch(query, key_cache, value_cache, ranges, heads, parts, lses, scale, causal, tiles)
        if num_splits > 1:
            launch_merge_stacked(parts, lses, output, lse)
    return output, lse


def _launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    ranges: tuple[torch.Tensor, ...],
    heads: tuple[torch.Tensor, ...],
    parts: torch.Tensor,
    lses: torch.Tensor,
    scale: float,
    causal: bool,
    tiles: Tiling,
) -> None:
    """Compute a part for each split; the first dimension of ``parts`` and ``lses`` is the split."""
    block_table = ranges[0]
    (num_tokens, _, head_size), num_seqs = query.shape, block_table.shape[0]
    num_splits, num_chosen = parts.shape[0], heads[0].shape[0]
    group_size = parts.shape[2] // num_chosen
    grid = (num_tokens // (tiles.rows // group_size) + num_seqs, num_chosen, num_splits)
    strides = (
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        *parts.stride()[:2],
        *lses.stride()[:2],
    )
    attend_parts[grid](
        query, key_cache, value_cache, *ranges, *heads, parts, lses, scale * LOG2_E, num_seqs,
        *strides,
        BLOCK_SIZE=key_cache.shape[1], GROUP_SIZE=group_size, HEAD_SIZE=head_size,
        HEAD_PADDED=next_power_of_2(head_size), TILE_ROWS=tiles.rows, TILE_KEYS=tiles.keys,
        CAUSAL=causal, IS_SPLIT=num_splits > 1, UPCAST=IS_INTERPRETED,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _empty_part(query: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make output and lse of a part, uninitialised."""
    num_tokens, _, head_size = query.shape
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32)
    return query.new_empty(num_tokens, num_heads, head_size), lse


@partial_attention.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads, group_size = others[_KV_HEADS - 1], others[_GROUP_SIZE - 1]
    return _empty_part(query, len(kv_heads) * group_size)


@functools.lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
