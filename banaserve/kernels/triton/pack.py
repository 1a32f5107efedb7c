"""Copies between KV blocks and slots in Triton: gather and scatter by block, layer and head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    cache,
    layer_offsets,
    block_ids,
    kv_heads,
    slots,
    slot_offsets,
    slot_ids,
    page_heads,
    num_layers,
    num_heads,
    cache_by_block,
    cache_by_token,
    cache_by_head,
    value_offset,
    slots_by_slot,
    slots_by_token,
    slots_by_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    OFFSETS_DIVIDE_BY: tl.constexpr,
    INTO_SLOTS: tl.constexpr,
):
    """Copy a head's keys and values in one program. Grid: blocks times layers times heads.

    ``layer_offsets`` and ``slot_offsets`` hold the begin of each layer in elements, from ``cache``,
    which may be in another allocation, and from a slot's first element.
    """
    program = tl.program_id(0)
    head = program % num_heads
    layer = (program // num_heads) % num_layers
    block = program // num_heads // num_layers
    layer_offset = tl.multiple_of(tl.load(layer_offsets + layer), OFFSETS_DIVIDE_BY)
    slot_offset = tl.multiple_of(tl.load(slot_offsets + layer), OFFSETS_DIVIDE_BY)
    in_cache = cache + layer_offset + tl.load(block_ids + block) * cache_by_block
    in_cache += tl.load(kv_heads + head).to(tl.int64) * cache_by_head
    in_slots = slots + slot_offset + tl.load(slot_ids + block) * slots_by_slot
    in_slots += tl.load(page_heads + head).to(tl.int64) * slots_by_head
    dims = tl.arange(0, HEAD_PADDED)
    for start in range(0, BLOCK_SIZE, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        mask = (tokens < BLOCK_SIZE)[:, None] & (dims < HEAD_SIZE)[None, :]
        mine = in_cache + tokens[:, None] * cache_by_token + dims[None, :]
        theirs = in_slots + tokens[:, None] * slots_by_token + dims[None, :]
        if INTO_SLOTS:
            keys = tl.load(mine, mask=mask)
            values = tl.load(mine + value_offset, mask=mask)
            tl.store(theirs, keys, mask=mask)
            tl.store(theirs + HEAD_SIZE, values, mask=mask)
        else:
            keys = tl.load(theirs, mask=mask)
            values = tl.load(theirs + HEAD_SIZE, mask=mask)
            tl.store(mine, keys, mask=mask)
            tl.store(mine + value_offset, values, mask=mask)
