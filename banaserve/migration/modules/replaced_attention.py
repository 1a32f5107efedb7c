"""Base of implementations that take the place of the one in vLLM's attention module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch

from banaserve.engine.compat.runner_hooks import set_implementation


class AttentionStep(NamedTuple):
    """Arguments of an attention in one step, without padding.

    Attributes:
        query: ``[num_tokens, num_heads, head_size]``.
        key: New keys ``[num_tokens, num_kv_heads, head_size]``; ``value`` likewise.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.
        metadata: vLLM's attention metadata.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: torch.Tensor
    metadata: Any


class ReplacedAttention(ABC):
    """Implementation of an attention that keeps the replaced one as ``inner``.

    Args:
        layer: vLLM's attention module.

    Attributes:
        inner: Implementation that is replaced, which has all attributes that this one lacks.
    """

    def __init__(self, layer: Any) -> None:
        # No reference to the layer: the cycle would keep the KV of a unit that a guest releases.
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _install(self, layer: Any, is_wanted: bool = True) -> None:
        """Take the place of ``inner``, or give it back; between two steps only."""
        set_implementation(layer, self if is_wanted else self.inner)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Fill ``output`` ``[num_tokens, num_heads, head_size]``, as vLLM's implementation does."""
        if attn_metadata is None:
            return output
        if self._leaves_to_inner():
            arguments = layer, query, key, value, kv_cache, attn_metadata
            whole: torch.Tensor = self.inner.forward(*arguments, output=output, **kwargs)
            return whole
        num_tokens = attn_metadata.num_actual_tokens
        new = query[:num_tokens], key[:num_tokens], value[:num_tokens]
        self._fill(output[:num_tokens], AttentionStep(*new, kv_cache, attn_metadata))
        return output

    def _leaves_to_inner(self) -> bool:
        """Return whether ``inner`` computes this step."""
        return False

    @abstractmethod
    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        """Fill ``output`` ``[num_tokens, num_heads, head_size]``."""
