"""Probe of the layout of latents (MLA) in the cache: one row per token, the same in any block."""

from __future__ import annotations

from typing import Any

import torch

from banaserve.base.errors import UserError
from banaserve.engine.compat.kv_cache import write_latents

_BLOCKS = 3


def check_latents(attention: Any, cache: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that a block's bytes depend on nothing but the latents of its tokens.

    The store copies whole blocks from one place to another, and tails of which some rows are not
    written yet: each latent must have a row of its own, with the same bytes in any block. The check
    lets vLLM's own code write into a few blocks beside the cache, which stays untouched.

    Args:
        cache: KV cache of that layer, ``[num_blocks, ..., block_size, row]``; only its shape and
            type are used.

    Raises:
        UserError: The latents have another layout.
    """
    block_size, row = cache.shape[-2:]
    shape = (_BLOCKS, block_size, row)
    blocks = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
    random = torch.Generator().manual_seed(0)
    width = attention.kv_lora_rank + attention.qk_rope_head_dim
    latents = torch.randn((block_size, width), generator=random).to(cache.device, dtype)

    slots = torch.arange(block_size, device=cache.device)
    write_latents(attention, latents, blocks, slots + block_size)
    last = block_size - 1
    # Write token by token, but not the last one, whose row has to stay zero.
    for token in range(last):
        one = slice(token, token + 1)
        write_latents(attention, latents[one], blocks, slots[one])
    found = blocks.view(torch.uint8).cpu()
    is_row_each = bool(
        torch.equal(found[0, :last], found[1, :last])
        and found[1].any(dim=-1).all()
        and not found[0, last].any()
        and not found[2].any()
    )
    if not is_row_each:
        raise UserError(
            "this model's attention does not keep one row for each token's latent, which the KV "
            "cache store goes by; serve it without the store: --colocated N --no-kv-store"
        )
