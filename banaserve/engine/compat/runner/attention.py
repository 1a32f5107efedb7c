"""vLLM's attention: modules, metadata builders and the context of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

from banaserve.engine.compat.config import VllmConfig, set_current_vllm_config
from banaserve.engine.compat.runner.hooks import window_tokens

__all__ = [
    "CommonAttentionMetadata",
    "ForwardContext",
    "get_forward_context",
    "override_forward_context",
    "set_default_torch_dtype",
    "set_forward_context",
]


def new_attention(
    config: VllmConfig,
    name: str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    scale: float,
    sliding_window: int | None,
    logits_soft_cap: float | None,
) -> Any:
    """Make an attention module of vLLM as a model would; it registers itself by ``name``."""
    from vllm.model_executor.layers.attention import Attention

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), set_default_torch_dtype(dtype):
        made: Any = Attention(
            num_heads,
            head_size,
            scale,
            num_kv_heads=num_kv_heads,
            cache_config=config.cache_config,
            logits_soft_cap=logits_soft_cap,
            per_layer_sliding_window=sliding_window,
            prefix=name,
        )
        made.process_weights_after_loading(dtype)
    return made


def metadata_builder(
    config: VllmConfig,
    layer: Any,
    names: Sequence[str],
    device: torch.device,
    num_kv_heads: int | None = None,
) -> Any:
    """Make a builder of the metadata that an attention module takes.

    Args:
        num_kv_heads: Number of the module's KV heads that attend; None for all.
    """
    with set_current_vllm_config(config):
        spec = layer.get_kv_cache_spec(config)
        if num_kv_heads is not None:
            spec = replace(spec, num_kv_heads=num_kv_heads)
        return layer.get_attn_backend().get_builder_cls()(spec, list(names), config, device)


def some_heads(
    config: VllmConfig, layer: Any, inner: Any, name: str, num_kv_heads: int
) -> tuple[Any, Any]:
    """Make an implementation like ``inner`` for some KV heads, and its metadata builder."""
    num_heads = layer.num_heads // layer.num_kv_heads * num_kv_heads
    with set_current_vllm_config(config):
        implementation = type(inner)(
            num_heads,
            layer.head_size,
            inner.scale,
            num_kv_heads,
            None,
            window_tokens(inner),
            inner.kv_cache_dtype,
            inner.logits_soft_cap or None,
        )
    isa = layer.isa
    builder = metadata_builder(config, layer, [name], layer.kv_cache.device, num_kv_heads)
    layer.isa = isa
    # The builder has counted the query heads of the whole layer.
    builder.num_heads = num_heads
    return implementation, builder


def split_batch(
    common: CommonAttentionMetadata, sizes: Sequence[int]
) -> list[CommonAttentionMetadata]:
    """Cut a batch between its tokens; a request that is cut continues in the next part.

    Args:
        sizes: Numbers of tokens of the parts, whose sum is the number of tokens of the batch.
    """
    starts = common.query_start_loc_cpu.numpy()
    slices = []
    begin = 0
    for size in sizes:
        end = begin + size
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        behind = int(np.searchsorted(starts, end, side="left"))
        slices.append(UBatchSlice(slice(first, behind), slice(begin, end)))
        begin = end
    return split_attn_metadata(slices, common)
