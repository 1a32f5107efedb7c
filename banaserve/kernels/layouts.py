"""Layout of one layer's KV cache in vLLM, and its views as keys and values."""

from __future__ import annotations

import torch


def key_value_views(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the keys and the values of a layer's cache, without copying.

    Args:
        cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, a token's key before its
            value. vLLM has this form for all its attention, in any order in memory (LBNHC, LBHNC,
            LHBNC, BLHNC and so on), which is in the strides.

    Returns:
        Two views ``[num_blocks, block_size, num_kv_heads, head_size]``.

    Raises:
        ValueError: The cache does not have that shape.
    """
    if cache.dim() != 4 or cache.shape[-1] % 2:
        raise ValueError(
            f"cache: shape {tuple(cache.shape)}; allowed: 4 dimensions, the last of even size"
        )
    key, value = cache.transpose(1, 2).chunk(2, dim=-1)
    return key, value
