"""Attention of a layer with split KV heads: some here, others in guests, outputs side by side.

``SplitHeads`` replaces an attention's implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.attention import some_heads
from banaserve.kernels.interface import Heads
from banaserve.migration.kv.dirty_blocks import spans
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.paged_attention import KernelsAttention, write_tokens
from banaserve.migration.modules.split_attention import (
    AttentionStep,
    GuestQuestion,
    GuestQuestions,
    OnLost,
    RemoteAttention,
    SplitAttention,
)


def index_of(layer: Any, heads: Sequence[int]) -> torch.Tensor:
    """Return numbers of heads as an index of tensors on the layer's device."""
    return torch.tensor(heads, dtype=torch.int64, device=layer.kv_cache.device)


def query_heads(layer: Any, heads: Sequence[int]) -> torch.Tensor:
    """Return the index of the query heads of KV heads."""
    group = layer.num_heads // layer.num_kv_heads
    return index_of(layer, [head * group + i for head in heads for i in range(group)])


class VllmHeads:
    """The heads here on vLLM's CPU kernels: each run of neighbours has a strided view of the KV."""

    def __init__(
        self,
        config: VllmConfig,
        layer: Any,
        inner: Any,
        name: str,
        here: Sequence[int],
        step_context: StepContext,
    ) -> None:
        self._layer = layer
        self._groups = [
            _Group(config, layer, inner, name, first, count) for first, count in spans(here)
        ]
        self._step_context = step_context

    def write(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write these heads' keys and values of ``[num_tokens, num_kv_heads, head_size]``."""
        for part in self._groups:
            mine = key[:, part.kv_heads].contiguous(), value[:, part.kv_heads].contiguous()
            cache = kv_cache[:, part.kv_heads]
            part.impl.do_kv_cache_update(self._layer, *mine, cache, slots)

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """Fill these heads of ``output`` ``[num_tokens, num_heads, head_size]``."""
        for part in self._groups:
            mine = query[:, part.query_heads].contiguous()
            own = torch.empty_like(mine)
            metadata = self._step_context.metadata(part.builder)
            cache = kv_cache[:, part.kv_heads]
            # New keys and values are in the cache already.
            part.impl.forward(self._layer, mine, None, None, cache, metadata, output=own)
            output[:, part.query_heads] = own


class _Group:
    """A run of neighbouring heads, with vLLM's implementation for them."""

    def __init__(
        self, config: VllmConfig, layer: Any, inner: Any, name: str, first: int, count: int
    ) -> None:
        group = layer.num_heads // layer.num_kv_heads
        self.kv_heads = slice(first, first + count)
        self.query_heads = slice(first * group, (first + count) * group)
        self.impl, self.builder = some_heads(config, layer, inner, name, count)


class KernelsHeads:
    """The heads here on our kernels, which attend with any heads; see ``VllmHeads``."""

    def __init__(
        self,
        layer: Any,
        attention: KernelsAttention,
        here: Sequence[int],
        step_context: StepContext,
    ) -> None:
        self._layer = layer
        self._attention = attention
        self._step_context = step_context
        self._here = tuple(sorted(here))
        self._heads = Heads(self._here, layer.num_heads // layer.num_kv_heads, self._here)
        self._query_heads = query_heads(layer, self._here)

    def write(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        # On a GPU all heads are written, by the kernel that writes them while all are here: that
        # call may be in a CUDA graph, and the memory of heads that are away is not given back.
        if self._attention.splits_only:
            self._attention.do_kv_cache_update(self._layer, key, value, kv_cache, slots)
        elif self._here:
            write_tokens(kv_cache, key, value, slots, self._here)

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        if self._here:
            # vLLM's metadata depends on its backend; the batch that it was made from does not.
            batch = self._step_context.common
            own = self._attention.attend(query, kv_cache, batch, self._heads)
            output[:, self._query_heads] = own


class _Away(NamedTuple):
    """Heads that are in one guest; ``query_heads`` and ``kv_heads`` are indices in the layer."""

    heads: Sequence[int]
    kv_heads: torch.Tensor
    query_heads: torch.Tensor
    where: RemoteAttention

    def question(self, name: str, step: AttentionStep) -> GuestQuestion[list[torch.Tensor]]:
        """Return the question of a step of the whole layer."""
        query = step.query[:, self.query_heads]
        new = step.key[:, self.kv_heads], step.value[:, self.kv_heads]
        submit = functools.partial(self.where.submit, name, query, *new)
        collect = functools.partial(self.where.collect, query)
        return GuestQuestion(self.where.link, submit, collect)


class SplitHeads(SplitAttention):
    """Attention with heads in several places: outputs are put side by side, nothing is merged."""

    def __init__(
        self,
        config: VllmConfig,
        layer: Any,
        name: str,
        step_context: StepContext,
        on_lost: OnLost,
    ) -> None:
        super().__init__(layer, name, step_context, on_lost)
        self._config = config
        self._local: VllmHeads | KernelsHeads | None = None
        self._units: dict[str, _Away] = {}

    def arrange(self, unit_id: str, heads: Sequence[int], where: RemoteAttention | None) -> None:
        """Set the guest with a unit's KV heads, between two steps; None: they are here."""
        layer = self._layer
        self._units = {name: one for name, one in self._units.items() if name != unit_id}
        if where is not None:
            indices = index_of(layer, heads), query_heads(layer, heads)
            self._units[unit_id] = _Away(heads, *indices, where)
        away = {head for one in self._units.values() for head in one.heads}
        here = [head for head in range(layer.num_kv_heads) if head not in away]
        self._local = self._stay(here) if away else None
        self._install(layer, bool(away))

    def _stay(self, here: Sequence[int]) -> VllmHeads | KernelsHeads:
        if isinstance(self.inner, KernelsAttention):
            return KernelsHeads(self._layer, self.inner, here, self._step_context)
        return VllmHeads(
            self._config, self._layer, self.inner, self._name, here, self._step_context
        )

    def do_kv_cache_update(self, layer: Any, *new: torch.Tensor) -> None:
        """Write the new keys and values of the heads here; arguments are those of ``write``."""
        if self._local is not None:
            self._local.write(*new)

    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        local, units = self._local, self._units.values()  # a guest that is lost changes them
        assert local is not None
        asked = GuestQuestions([one.question(self._name, step) for one in units])
        local.attend(step.query, step.kv_cache, output)
        for away, answer in zip(units, asked.answers(), strict=True):
            if isinstance(answer, GuestLostError):
                self._on_lost(away.where.link, answer)
                output[:, away.query_heads] = 0  # finite: the step's output is dropped
            else:
                # In place: half the cost of concatenating on a CPU.
                output[:, away.query_heads] = answer[0]
