"""The KV heads of a split layer that stay, and how theirs and others' outputs come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from banaserve.engine.vllm.migration.host_kv import spans
from banaserve.engine.vllm.migration.kernels_attention import KernelsAttention, write_tokens
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.kernels.interface import Heads


class Remote(NamedTuple):
    """What a guest has computed of a step of one layer.

    Attributes:
        kv_heads: Ascending.
        query_heads: Where their outputs stand in the layer's, int64.
        output: ``[num_tokens, query heads, head_size]``; None where the guest is lost.
    """

    kv_heads: tuple[int, ...]
    query_heads: torch.Tensor
    output: torch.Tensor | None


class LocalHeads(Protocol):
    """Heads of one layer that are here."""

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write theirs of a step's keys and values ``[num_tokens, num_kv_heads, head_size]``."""
        ...

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """Begin to fill ``output`` ``[num_tokens, num_heads, head_size]``, shaped as ``query``."""
        ...

    def join(self, output: torch.Tensor, remote: Sequence[Remote]) -> None:
        """Fill the rest; zero for heads whose guest is lost. Follows ``attend``."""
        ...


class VllmHeads:
    """vLLM's kernels on CPU: each run of neighbouring heads takes a strided view of the KV."""

    def __init__(
        self,
        config: VllmConfig,
        layer: Any,
        inner: Any,
        name: str,
        here: Sequence[int],
        watch: StepWatch,
    ) -> None:
        self._groups = [
            _Group(config, layer, inner, name, first, count) for first, count in spans(here)
        ]
        self._watch = watch

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``LocalHeads``."""
        for part in self._groups:
            part.impl.do_kv_cache_update(
                layer,
                key[:, part.kv_heads].contiguous(),
                value[:, part.kv_heads].contiguous(),
                kv_cache[:, part.kv_heads],
                slot_mapping,
            )

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """See ``LocalHeads``."""
        for part in self._groups:
            mine = query[:, part.query_heads].contiguous()
            own = torch.empty_like(mine)
            metadata = self._watch.metadata(part.builder)
            cache = kv_cache[:, part.kv_heads]
            # New keys and values lie in the cache already.
            part.impl.forward(layer, mine, None, None, cache, metadata, output=own)
            output[:, part.query_heads] = own

    def join(self, output: torch.Tensor, remote: Sequence[Remote]) -> None:
        """See ``LocalHeads``. Written to their places: half of what concatenating costs here."""
        for part in remote:
            output[:, part.query_heads] = 0 if part.output is None else part.output


class _Group:
    """Neighbouring heads."""

    def __init__(
        self, config: VllmConfig, layer: Any, inner: Any, name: str, first: int, count: int
    ) -> None:
        group = layer.num_heads // layer.num_kv_heads
        self.kv_heads = slice(first, first + count)
        self.query_heads = slice(first * group, (first + count) * group)
        window = inner.sliding_window
        with set_current_vllm_config(config):
            self.impl = type(inner)(
                count * group,
                layer.head_size,
                inner.scale,
                count,
                None,
                None if window is None or window < 0 else window,
                inner.kv_cache_dtype,
                inner.logits_soft_cap or None,
            )
            spec = replace(layer.get_kv_cache_spec(config), num_kv_heads=count)
            isa = layer.isa
            self.builder = layer.get_attn_backend().get_builder_cls()(
                spec, [name], config, layer.kv_cache.device
            )
            layer.isa = isa
        # The builder counts the query heads of the whole layer.
        self.builder.num_heads = count * group


class KernelsHeads:
    """Our kernels: they attend with any heads of the layer, and put all outputs side by side."""

    def __init__(
        self, layer: Any, attention: KernelsAttention, here: Sequence[int], watch: StepWatch
    ) -> None:
        self._attention = attention
        self._watch = watch
        self._here = tuple(sorted(here))
        self._heads = Heads(self._here, layer.num_heads // layer.num_kv_heads, self._here)
        self._own: torch.Tensor | None = None

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """See ``LocalHeads``."""
        if self._here:
            write_tokens(kv_cache, key, value, slot_mapping, self._here)

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
    ) -> None:
        """See ``LocalHeads``."""
        if self._here:
            # What vLLM's metadata says depends on its backend; what that was made of does not.
            batch = self._watch.common
            self._own = self._attention.attend(query, kv_cache, batch, self._heads)

    def join(self, output: torch.Tensor, remote: Sequence[Remote]) -> None:
        """See ``LocalHeads``; BanaServe Eq. 8 to 10 for heads, which have nothing in common."""
        parts = [_zeros(output, r) if r.output is None else r.output for r in remote]
        groups = [r.kv_heads for r in remote]
        own, self._own = self._own, None
        if own is not None:
            parts, groups = [own, *parts], [self._here, *groups]
        output[:] = self._attention.kernels.concat_heads(parts, groups)


def _zeros(output: torch.Tensor, remote: Remote) -> torch.Tensor:
    return output.new_zeros(len(output), len(remote.query_heads), output.shape[2])
