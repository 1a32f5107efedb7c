"""Argument checks that all implementations share: a wrong argument raises and names itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from banaserve.kernels.interface import (
    FLOAT_DTYPES,
    HEAD_SIZES,
    Batch,
    BlockCopies,
    Heads,
    PartialAttention,
)

COPY_ELEMENT_BYTES = (1, 2, 4)


def check_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, heads: Heads
) -> None:
    """Check shapes, dtypes, strides and devices of ``partial_attention``; read no tensor's values.

    Raises:
        ValueError: An argument is not supported; the text names it and what is allowed.
    """
    _require(query.dim() == 3, "query", query, "[num_tokens, num_query_heads, head_size]")
    _require(query.dtype in FLOAT_DTYPES, "query", query, "float16, bfloat16 or float32")
    _require(query.shape[2] in HEAD_SIZES, "query", query, HEAD_SIZES, "for the head size")
    _require(query.stride(2) == 1, "query", query, "contiguous heads")
    for name, cache in (("key_cache", key), ("value_cache", value)):
        _require(cache.dim() == 4, name, cache, "[blocks, block_size, kv_heads, head_size]")
        _require(cache.dtype == query.dtype, name, cache, "the query's", query.dtype)
        _require(cache.device == query.device, name, cache, "the query's", query.device)
        _require(cache.shape[3] == query.shape[2], name, cache, "the query's head size")
        _require(cache.stride(3) == 1, name, cache, "contiguous heads")
    _require(key.shape == value.shape, "value_cache", value, "the key_cache's", key.shape)
    _check_batch(batch, query.device)
    _check_heads(heads, key.shape[2], query.shape[1])


def _check_batch(batch: Batch, device: torch.device) -> None:
    table = batch.block_table
    _require(table.dim() == 2, "block_table", table, "2 dimensions")
    _require(batch.max_range_tokens >= 0, "max_range_tokens", batch.max_range_tokens, "0 or more")
    num_seqs = table.shape[0]
    for name, tensor, length in (
        ("query_start", batch.query_start, num_seqs + 1),
        ("query_position", batch.query_position, num_seqs),
        ("range_start", batch.range_start, num_seqs),
        ("range_end", batch.range_end, num_seqs),
    ):
        _require(tensor.dim() == 1 and len(tensor) == length, name, tensor, "length", length)
        _require(tensor.is_contiguous(), name, tensor, "contiguous")
        _require(tensor.dtype == torch.int32, name, tensor, "int32")
        _require(tensor.device == device, name, tensor, "the query's", device)
    _require(table.dtype == torch.int32, "block_table", table, "int32")
    _require(table.device == device, "block_table", table, "the query's", device)
    rows = table.stride(1) == 1 or table.numel() == 0
    _require(rows, "block_table", table, "contiguous rows")


def _check_heads(heads: Heads, num_kv_heads: int, num_query_heads: int) -> None:
    chosen, groups, size = heads.kv_heads, heads.groups, heads.group_size
    _require(size >= 1, "group_size", size, "at least 1")
    _check_chosen("kv_heads", chosen, num_kv_heads)
    _require(len(groups) == len(chosen), "query_groups", groups, "one for each of", chosen)
    whole = num_query_heads % size == 0
    _require(whole, "query", num_query_heads, "heads in whole groups of", size)
    _check_chosen("query_groups", groups, num_query_heads // size)


def check_parts(parts: Sequence[PartialAttention]) -> None:
    """Check shapes, dtypes, strides and devices of ``merge``.

    Raises:
        ValueError: An argument is not supported; the text names it and what is allowed.
    """
    _require(len(parts) > 0, "parts", "none", "at least one")
    first = parts[0].output
    _require(first.dim() == 3, "output", first, "[num_tokens, num_heads, head_size]")
    _require(first.dtype in FLOAT_DTYPES, "output", first.dtype, "float16, bfloat16 or float32")
    for output, lse in parts:
        _require(output.shape == first.shape, "output", output, "as the first")
        _require(output.dtype == first.dtype, "output", output.dtype, f"the first's {first.dtype}")
        _require(output.device == first.device, "output", output.device, first.device)
        _require(
            output.stride(2) == 1 or output.numel() == 0,
            "output",
            output,
            "contiguous heads",
        )
        _require(lse.shape == first.shape[:2], "lse", lse, f"{tuple(first.shape[:2])}")
        _require(lse.dtype == torch.float32, "lse", lse.dtype, "float32")
        _require(lse.device == first.device, "lse", lse.device, f"the output's {first.device}")


def check_blocks(copies: BlockCopies) -> None:
    """Check shapes, dtypes, strides and devices of ``pack_blocks`` and ``unpack_blocks``.

    Raises:
        ValueError: A field is not supported; the text names it and what is allowed.
    """
    cache, block_ids, kv_heads, pages = copies
    _require(cache.dim() == 4, "cache", cache, "[blocks, kv_heads, block_size, 2 * head_size]")
    _require(cache.stride(3) == 1, "cache", cache, "contiguous heads")
    size = cache.element_size()
    _require(size in COPY_ELEMENT_BYTES, "cache", cache.dtype, "elements of 1, 2 or 4 bytes")
    _check_chosen("kv_heads", tuple(kv_heads), cache.shape[1])
    _require(block_ids.dtype == torch.int64, "block_ids", block_ids.dtype, "int64")
    _require(block_ids.device == cache.device, "block_ids", block_ids, "the cache's", cache.device)
    form = block_ids.dim() == 1 and block_ids.is_contiguous()
    _require(form, "block_ids", block_ids, "[n], contiguous")
    _require(pages.dtype == torch.uint8, "pages", pages.dtype, "uint8")
    wanted = len(block_ids), cache.shape[1:].numel() * size
    _require(tuple(pages.shape) == wanted, "pages", pages, wanted)
    whole = pages.is_contiguous() and pages.storage_offset() % size == 0
    _require(whole, "pages", pages, f"contiguous, from a whole {size} bytes on")
    _require(pages.device == cache.device, "pages", pages, "the cache's", cache.device)


def _check_chosen(name: str, chosen: tuple[int, ...], count: int) -> None:
    once = set(chosen)
    valid = len(once) == len(chosen) > 0 and min(chosen) >= 0 and max(chosen) < count
    _require(valid, name, chosen, "one or more, each once, below", count)


def _require(holds: bool, argument: str, seen: object, *allowed: object) -> None:
    # The text is made only for an error: these checks run before every launch.
    if holds:
        return
    if isinstance(seen, torch.Tensor):
        shape, strides = tuple(seen.shape), seen.stride()
        seen = f"shape {shape} strides {strides} of {seen.dtype} on {seen.device}"
    raise ValueError(f"{argument}: {seen}; allowed: {' '.join(map(str, allowed))}")
