"""vLLM's layouts of one layer's KV cache, and their views as keys and values of one form."""

from __future__ import annotations

from enum import StrEnum

import torch


class KvLayout(StrEnum):
    """Logical shape of one layer's KV cache. Its order in memory is in the tensor's strides.

    Attributes:
        CONTENT: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a token's key before its
            value. vLLM 0.32 has this form for all its GPU attention, in any order in memory (LBNHC,
            LBHNC, LHBNC, BLHNC and so on).
        BLOCKS_KV_NHD: ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, FlashInfer's NHD.
        BLOCKS_KV_HND: ``[num_blocks, 2, num_kv_heads, block_size, head_size]``, FlashInfer's HND.
        KV_BLOCKS_NHD: ``[2, num_blocks, block_size, num_kv_heads, head_size]``, FlashAttention's
            before vLLM 0.32.
        KV_BLOCKS_HND: ``[2, num_blocks, num_kv_heads, block_size, head_size]``.
    """

    CONTENT = "content"
    BLOCKS_KV_NHD = "blocks_kv_nhd"
    BLOCKS_KV_HND = "blocks_kv_hnd"
    KV_BLOCKS_NHD = "kv_blocks_nhd"
    KV_BLOCKS_HND = "kv_blocks_hnd"


def key_value_views(cache: torch.Tensor, layout: KvLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and the values of a layer's cache, without copying.

    Returns:
        Two views ``[num_blocks, block_size, num_kv_heads, head_size]``.

    Raises:
        ValueError: The cache does not have the shape of ``layout``.
    """
    if layout is KvLayout.CONTENT:
        if cache.dim() != 4 or cache.shape[-1] % 2:
            raise ValueError(_mismatch(cache, layout, "4 dimensions, the last of even size"))
        key, value = cache.transpose(1, 2).chunk(2, dim=-1)
        return key, value
    pair = 0 if layout in (KvLayout.KV_BLOCKS_NHD, KvLayout.KV_BLOCKS_HND) else 1
    if cache.dim() != 5 or cache.shape[pair] != 2:
        raise ValueError(
            _mismatch(cache, layout, f"5 dimensions, of which number {pair} has size 2")
        )
    key, value = cache.unbind(pair)
    if layout in (KvLayout.BLOCKS_KV_HND, KvLayout.KV_BLOCKS_HND):
        return key.transpose(1, 2), value.transpose(1, 2)
    return key, value


def _mismatch(cache: torch.Tensor, layout: KvLayout, allowed: str) -> str:
    return (
        f"cache: shape {tuple(cache.shape)} does not fit layout {layout.value}; allowed: {allowed}"
    )
