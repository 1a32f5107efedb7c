"""vLLM's KV cache: its specification, the hashes of its blocks and copies between its blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
)
from vllm.v1.request import Request

from banaserve.engine.compat.config import VllmConfig

__all__ = [
    "FullAttentionSpec",
    "KVCacheBlocks",
    "KVCacheConfig",
    "MLAAttentionSpec",
    "MambaSpec",
    "RSWASpec",
    "Request",
    "generate_block_hash_extra_keys",
    "get_hash_fn_by_name",
    "get_request_block_hasher",
    "hash_block_tokens",
    "init_none_hash",
]


def block_hasher(config: VllmConfig, block_size: int) -> Callable[[Request], list[BlockHash]]:
    """Return vLLM's chained block hasher, initialised for this process."""
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    return get_request_block_hasher(block_size, hash_function)


def rehash(request: Request, hasher: Callable[[Request], list[BlockHash]]) -> None:
    """Recompute a request's block hashes with this hasher, from the first block on."""
    request._block_hasher = hasher
    request.block_hashes = []
    request.update_block_hashes()


def batch_copier() -> Callable[[Any, Any, Any], None]:
    """Return ``copy(source_addresses, target_addresses, sizes_bytes)``, one call on a GPU's stream.

    Each argument of ``copy`` is a CPU tensor ``[num_copies]`` int64.
    """
    from vllm import _custom_ops

    copy: Callable[[Any, Any, Any], None] = _custom_ops.swap_blocks_batch
    return copy


def cpu_instruction_set(spec: FullAttentionSpec) -> str:
    """Return the instruction set for which vLLM's attention on CPU packs K inside a block."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(spec.dtype, spec.block_size, spec.head_size))


def write_latents(
    attention: Any, latents: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor
) -> None:
    """Let an ``MLAAttention`` write latents into blocks in its own layout, at a scale of 1.

    Args:
        latents: ``[num_tokens, latent + positions]`` in the model's type.
        blocks: ``[num_blocks, block_size, row]`` in the cache's type.
        slots: ``[num_tokens]`` int64, the place of each token: block times block size plus row.
    """
    sizes = [attention.kv_lora_rank, attention.qk_rope_head_dim]
    values, positions = (part.contiguous() for part in latents.split(sizes, dim=-1))
    attention.impl.do_kv_cache_update(
        values,
        positions.unsqueeze(1),
        blocks,
        slots,
        attention.kv_cache_dtype,
        torch.ones((), dtype=torch.float32, device=latents.device),
    )
