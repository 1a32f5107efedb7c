"""Attention of some KV heads of a layer in a guest, over a KV cache of its own."""

from __future__ import annotations

from typing import Any

import torch

from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.attention import (
    CommonAttentionMetadata,
    metadata_builder,
    new_attention,
)
from banaserve.kernels.interface import Kernels
from banaserve.kernels.layouts import key_value_views
from banaserve.migration.modules.paged_attention import (
    KvPages,
    StepBatches,
    all_heads,
    write_tokens,
)
from banaserve.migration.rpc.messages import AttentionSlice


class VllmHeadAttention:
    """vLLM's own attention module with fewer heads."""

    def __init__(
        self, config: VllmConfig, part: AttentionSlice, unit_id: str, kv_cache: torch.Tensor
    ) -> None:
        self._config = config
        self._name = f"{part.name}.{unit_id}"
        self._kv_cache: torch.Tensor | None = kv_cache
        self._attention: Any = new_attention(
            config,
            self._name,
            part.num_heads,
            part.num_kv_heads,
            part.head_size,
            part.scale,
            part.sliding_window,
            part.logits_soft_cap,
        )
        self._builder: Any = metadata_builder(
            config, self._attention, [self._name], kv_cache.device
        )

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """Return a step's data for ``run``; equal for all layers with the same number of heads."""
        return self._builder.build(0, common)

    def pages(self) -> KvPages:
        """Return the attention over the pages of the KV cache."""
        assert self._kv_cache is not None
        return KvPages.of(self._attention, self._attention.impl, self._kv_cache)

    def run(
        self,
        metadata: Any,
        slot_mapping: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Write the new keys and values, then attend.

        Args:
            slot_mapping: ``[num_tokens]`` int64.
            query: ``[num_tokens, num_heads, head_size]``.
            key: ``[num_tokens, num_kv_heads, head_size]``; ``value`` likewise.

        Returns:
            Attention output, in the shape of ``query``.
        """
        layer = self._attention
        out = torch.empty_like(query)
        with torch.inference_mode():
            layer.impl.do_kv_cache_update(layer, key, value, self._kv_cache, slot_mapping)
            layer.impl.forward(layer, query, key, value, self._kv_cache, metadata, output=out)
        return out

    def close(self) -> None:
        """Release the KV cache."""
        self._config.compilation_config.static_forward_context.pop(self._name, None)
        self._kv_cache, self._builder, self._attention = None, None, None


class KernelsHeadAttention:
    """Attention of heads through the kernels of the KV's device; see ``VllmHeadAttention``."""

    def __init__(self, part: AttentionSlice, kv_cache: torch.Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._scale = part.scale
        self._heads = all_heads(part.num_heads, part.num_kv_heads)
        self._kv_cache: torch.Tensor | None = kv_cache

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        return StepBatches().of(common)

    def run(
        self,
        metadata: Any,
        slot_mapping: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        assert self._kv_cache is not None
        with torch.inference_mode():
            write_tokens(self._kv_cache, key, value, slot_mapping)
            keys, values = key_value_views(self._kv_cache)
            part = self._kernels.partial_attention(
                query, keys, values, metadata, self._heads, self._scale
            )
        return part.output

    def close(self) -> None:
        self._kv_cache = None


HeadAttention = VllmHeadAttention | KernelsHeadAttention


def head_attention(
    config: VllmConfig,
    part: AttentionSlice,
    unit_id: str,
    kv_cache: torch.Tensor,
    kernels: Kernels | None,
) -> HeadAttention:
    """Return a slice's attention over KV ``[num_blocks, num_kv_heads, ...]``.

    It is computed by ``kernels``, or by vLLM's own attention if ``kernels`` is None.
    """
    if kernels is not None:
        return KernelsHeadAttention(part, kv_cache, kernels)
    return VllmHeadAttention(config, part, unit_id, kv_cache)
