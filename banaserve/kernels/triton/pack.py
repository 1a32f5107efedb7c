"""Copies between KV blocks and pages in Triton: gather and scatter by block and head."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_pages(
    cache,
    block_ids,
    kv_heads,
    pages,
    num_heads,
    cache_by_block,
    cache_by_head,
    cache_by_token,
    pages_by_page,
    BLOCK_SIZE: tl.constexpr,
    CONTENT_SIZE: tl.constexpr,
    CONTENT_PADDED: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    INTO_PAGES: tl.constexpr,
):
    """Copy a head of a block in one program. Grid: blocks times chosen heads.

    ``CONTENT_SIZE`` is the number of elements of a token's key and value, which are neighbours.
    """
    program = tl.program_id(0)
    page = (program // num_heads).to(tl.int64)
    head = tl.load(kv_heads + program % num_heads).to(tl.int64)
    in_cache = cache + tl.load(block_ids + page) * cache_by_block + head * cache_by_head
    in_page = pages + page * pages_by_page + head * BLOCK_SIZE * CONTENT_SIZE
    content = tl.arange(0, CONTENT_PADDED)
    for start in range(0, BLOCK_SIZE, TILE_TOKENS):
        tokens = start + tl.arange(0, TILE_TOKENS)
        mask = (tokens < BLOCK_SIZE)[:, None] & (content < CONTENT_SIZE)[None, :]
        mine = in_cache + tokens[:, None] * cache_by_token + content[None, :]
        theirs = in_page + tokens[:, None] * CONTENT_SIZE + content[None, :]
        if INTO_PAGES:
            tl.store(theirs, tl.load(mine, mask=mask), mask=mask)
        else:
            tl.store(mine, tl.load(theirs, mask=mask), mask=mask)
