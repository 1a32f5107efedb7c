"""Attention of some KV heads of a layer, over a KV cache of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.engine.vllm.migration.kv_pages import Pages, pages_of
from banaserve.engine.vllm.migration.messages import AttentionSlice


class HeadAttention:
    """Heads that a guest computes: vLLM's own attention module with fewer heads."""

    def __init__(
        self, config: VllmConfig, part: AttentionSlice, unit_id: str, device: torch.device
    ) -> None:
        from vllm.model_executor.layers.attention import Attention

        self._config = config
        self._device = device
        self._name = f"{part.name}.{unit_id}"
        dtype = config.model_config.dtype
        with set_current_vllm_config(config), set_default_torch_dtype(dtype):
            self._attention: Any = Attention(
                part.num_heads,
                part.head_size,
                part.scale,
                num_kv_heads=part.num_kv_heads,
                cache_config=config.cache_config,
                logits_soft_cap=part.logits_soft_cap,
                per_layer_sliding_window=part.sliding_window,
                prefix=self._name,
            )
            self._attention.process_weights_after_loading(dtype)
        self._builder: Any = None
        self._kv_cache: torch.Tensor | None = None

    def bind(self, kv_cache: torch.Tensor) -> None:
        """Give it its KV cache, ``[num_blocks, num_kv_heads, ...]``."""
        self._kv_cache = kv_cache
        spec = self._attention.get_kv_cache_spec(self._config)
        with set_current_vllm_config(self._config):
            self._builder = self._attention.get_attn_backend().get_builder_cls()(
                spec, [self._name], self._config, self._device
            )

    def metadata(self, common: CommonAttentionMetadata) -> Any:
        """What ``run`` needs of a step; the same for every layer with as many heads."""
        return self._builder.build(0, common)

    def pages(self) -> Pages:
        """How to read keys and values of a KV cache as it is bound to."""
        assert self._kv_cache is not None
        return pages_of(self._attention, self._attention.impl, self._kv_cache)

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
            As ``query``.
        """
        layer = self._attention
        out = torch.empty_like(query)
        with torch.inference_mode():
            layer.impl.do_kv_cache_update(layer, key, value, self._kv_cache, slot_mapping)
            layer.impl.forward(layer, query, key, value, self._kv_cache, metadata, output=out)
        return out

    def close(self) -> None:
        """Let go of the KV cache."""
        self._config.compilation_config.static_forward_context.pop(self._name, None)
        self._kv_cache, self._builder, self._attention = None, None, None
