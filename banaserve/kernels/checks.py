"""What every implementation refuses: a wrong argument is named, never computed with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from banaserve.kernels.interface import FLOAT_DTYPES, HEAD_SIZES, Batch, Heads, Part
from banaserve.kernels.layouts import KvLayout, key_value_views
from banaserve.kernels.slot_pages import SlotPages

COPY_ELEMENT_BYTES = (1, 2, 4)


def check_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: Batch, heads: Heads
) -> None:
    """Shapes, dtypes, strides and devices of ``partial_attention``; reads no tensor's values.

    Raises:
        ValueError: An argument is not taken; the text names it and what is allowed.
    """
    _require(query.dim() == 3, "query", _seen(query), "[num_tokens, num_query_heads, head_size]")
    _require(query.dtype in FLOAT_DTYPES, "query", query.dtype, "float16, bfloat16 or float32")
    _require(query.shape[2] in HEAD_SIZES, "query", f"head size {query.shape[2]}", HEAD_SIZES)
    _require(query.stride(2) == 1, "query", f"strides {query.stride()}", "contiguous heads")
    for name, cache in (("key_cache", key), ("value_cache", value)):
        _require(cache.dim() == 4, name, _seen(cache), "[blocks, block_size, kv_heads, head_size]")
        _require(cache.dtype == query.dtype, name, cache.dtype, f"the query's {query.dtype}")
        _require(cache.device == query.device, name, cache.device, f"the query's {query.device}")
        _require(cache.shape[3] == query.shape[2], name, _seen(cache), "the query's head size")
        _require(cache.stride(3) == 1, name, f"strides {cache.stride()}", "contiguous heads")
    _require(key.shape == value.shape, "value_cache", _seen(value), f"{_seen(key)}, as key_cache")
    _check_batch(batch, query.device)
    _check_heads(heads, key.shape[2], query.shape[1])


def _check_batch(batch: Batch, device: torch.device) -> None:
    num_seqs = batch.block_table.shape[0]
    _require(batch.block_table.dim() == 2, "block_table", _seen(batch.block_table), "2 dimensions")
    _require(batch.max_range_tokens >= 0, "max_range_tokens", batch.max_range_tokens, "0 or more")
    lengths = {
        "query_start": num_seqs + 1,
        "query_position": num_seqs,
        "range_start": num_seqs,
        "range_end": num_seqs,
    }
    for name, length in lengths.items():
        tensor = getattr(batch, name)
        _require(tuple(tensor.shape) == (length,), name, _seen(tensor), f"[{length}]")
        _require(tensor.is_contiguous(), name, f"strides {tensor.stride()}", "contiguous")
    for name in ("block_table", *lengths):
        tensor = getattr(batch, name)
        _require(tensor.dtype == torch.int32, name, tensor.dtype, "int32")
        _require(tensor.device == device, name, tensor.device, f"the query's {device}")
    row = batch.block_table
    _require(row.stride(1) == 1 or row.numel() == 0, "block_table", row.stride(), "contiguous rows")


def _check_heads(heads: Heads, num_kv_heads: int, num_query_heads: int) -> None:
    chosen, groups = heads.kv_heads, heads.groups
    _require(heads.group_size >= 1, "group_size", heads.group_size, "at least 1")
    _check_chosen("kv_heads", chosen, num_kv_heads)
    _require(
        len(groups) == len(chosen),
        "query_groups",
        groups,
        f"one for each of {len(chosen)} kv_heads",
    )
    _require(
        num_query_heads % heads.group_size == 0,
        "query",
        f"{num_query_heads} heads",
        f"whole groups of {heads.group_size}",
    )
    _check_chosen("query_groups", groups, num_query_heads // heads.group_size)


def check_parts(parts: Sequence[Part]) -> None:
    """Shapes, dtypes, strides and devices of ``merge``.

    Raises:
        ValueError: An argument is not taken; the text names it and what is allowed.
    """
    _require(len(parts) > 0, "parts", "none", "at least one")
    first = parts[0].output
    _require(first.dim() == 3, "output", _seen(first), "[num_tokens, num_heads, head_size]")
    _require(first.dtype in FLOAT_DTYPES, "output", first.dtype, "float16, bfloat16 or float32")
    for output, lse in parts:
        _require(
            output.shape == first.shape, "output", _seen(output), f"the first's {_seen(first)}"
        )
        _require(output.dtype == first.dtype, "output", output.dtype, f"the first's {first.dtype}")
        _require(output.device == first.device, "output", output.device, first.device)
        _require(
            output.stride(2) == 1 or output.numel() == 0,
            "output",
            f"strides {output.stride()}",
            "contiguous heads",
        )
        _require(lse.shape == first.shape[:2], "lse", _seen(lse), f"{tuple(first.shape[:2])}")
        _require(lse.dtype == torch.float32, "lse", lse.dtype, "float32")
        _require(lse.device == first.device, "lse", lse.device, f"the output's {first.device}")


def check_concat(parts: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> int:
    """Shapes, dtypes and devices of ``concat_heads``.

    Returns:
        Query heads for each KV head.

    Raises:
        ValueError: An argument is not taken; the text names it and what is allowed.
    """
    _require(len(parts) > 0, "parts", "none", "at least one")
    _require(
        len(groups) == len(parts), "groups", f"{len(groups)} of them", f"{len(parts)}, as parts"
    )
    every = sorted(head for group in groups for head in group)
    _require(every == list(range(len(every))), "groups", every, "all KV heads, each once")
    first, sizes = parts[0], set()
    for part, group in zip(parts, groups, strict=True):
        _require(part.dim() == 3, "parts", _seen(part), "[num_tokens, num_heads, head_size]")
        _require(
            part.stride(2) == 1 or part.numel() == 0, "parts", part.stride(), "contiguous heads"
        )
        _require(part.dtype == first.dtype, "parts", part.dtype, f"the first's {first.dtype}")
        _require(part.element_size() in COPY_ELEMENT_BYTES, "parts", part.dtype, "1, 2 or 4 bytes")
        _require(part.device == first.device, "parts", part.device, f"the first's {first.device}")
        same = (part.shape[0], part.shape[2]) == (first.shape[0], first.shape[2])
        _require(same, "parts", _seen(part), f"tokens and head size of {_seen(first)}")
        _require(
            len(group) > 0 and part.shape[1] > 0 and part.shape[1] % len(group) == 0,
            "parts",
            f"{part.shape[1]} query heads for {len(group)} KV heads",
            "whole groups",
        )
        sizes.add(part.shape[1] // len(group))
    _require(len(sizes) == 1, "parts", f"groups of {sorted(sizes)} heads", "one size for all parts")
    return sizes.pop()


def check_blocks(
    caches: Sequence[torch.Tensor],
    layout: KvLayout,
    block_ids: torch.Tensor,
    kv_heads: Sequence[int],
    slots: torch.Tensor,
    slot_ids: torch.Tensor,
    pages: SlotPages,
) -> None:
    """Shapes, dtypes, strides and devices of ``pack_blocks`` and ``unpack_blocks``.

    Raises:
        ValueError: An argument is not taken; the text names it and what is allowed.
    """
    _require(len(caches) > 0, "caches", "none", "at least one")
    _require(len(caches) == len(pages.layers), "caches", len(caches), f"{len(pages.layers)} layers")
    first = caches[0]
    for cache in caches:
        same = (cache.shape, cache.stride(), cache.dtype, cache.device) == (
            (first.shape, first.stride(), first.dtype, first.device)
        )
        _require(same, "caches", f"{_seen(cache)} {cache.dtype}", f"all as {_seen(first)}")
    size = first.element_size()
    _require(size in COPY_ELEMENT_BYTES, "caches", first.dtype, "elements of 1, 2 or 4 bytes")
    key, _ = key_value_views(first, layout)
    _require(key.stride(3) == 1, "caches", f"strides {first.stride()}", "contiguous heads")
    form = (pages.block_size_tokens, pages.head_size)
    _require((key.shape[1], key.shape[3]) == form, "caches", _seen(first), f"pages of {form}")
    _check_chosen("kv_heads", tuple(kv_heads), key.shape[2])
    _require(len(kv_heads) == len(pages.heads), "kv_heads", len(kv_heads), f"{len(pages.heads)}")
    for name, ids in (("block_ids", block_ids), ("slot_ids", slot_ids)):
        _require(ids.dtype == torch.int64, name, ids.dtype, "int64")
        _require(ids.device == first.device, name, ids.device, f"the caches' {first.device}")
        _require(ids.dim() == 1 and ids.is_contiguous(), name, _seen(ids), "[n], contiguous")
    _require(block_ids.shape == slot_ids.shape, "slot_ids", _seen(slot_ids), _seen(block_ids))
    _check_slots(slots, first.device, pages, size)


def _check_slots(slots: torch.Tensor, device: torch.device, pages: SlotPages, size: int) -> None:
    _require(slots.dtype == torch.uint8, "slots", slots.dtype, "uint8")
    _require(slots.dim() == 2, "slots", _seen(slots), "[num_slots, slot_bytes]")
    needed = pages.end_bytes(size)
    _require(slots.shape[1] >= needed, "slots", f"{slots.shape[1]} bytes", f"{needed} or more")
    whole = all(n % size == 0 for n in (slots.shape[1], slots.stride(0), slots.storage_offset()))
    _require(whole and slots.stride(1) == 1, "slots", slots.stride(), f"rows of whole {size} bytes")
    _require(slots.device == device, "slots", slots.device, f"the caches' {device}")


def _check_chosen(name: str, chosen: tuple[int, ...], count: int) -> None:
    valid = len(set(chosen)) == len(chosen) > 0 and set(chosen) <= set(range(count))
    _require(valid, name, chosen, f"one or more of 0 to {count - 1}, each once")


def _seen(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"


def _require(holds: bool, argument: str, seen: object, allowed: object) -> None:
    if not holds:
        raise ValueError(f"{argument}: {seen}; allowed: {allowed}")
