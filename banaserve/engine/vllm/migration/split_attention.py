"""Takes the place of an attention's implementation: some KV heads here, others in guests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.host_kv import spans
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.errors import GuestLostError


class RemoteHeads(Protocol):
    """Some heads of one layer in one guest."""

    @property
    def link(self) -> GuestLink: ...

    def post(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def collect(self) -> torch.Tensor: ...


class _Posted(NamedTuple):
    """Heads whose output is awaited.

    Attributes:
        where: None where the guest is lost.
        parts: Query, key and value, where the guest is still to be asked.
    """

    query_heads: torch.Tensor
    where: RemoteHeads | None
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class _LocalGroup:
    """Neighbouring heads that stay: the kernel takes a strided view of the layer's KV."""

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


class SplitAttention:
    """Heads are independent: their outputs lie side by side, and nothing has to be merged.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes.
        on_lost: Called when a guest is lost in the middle of a step.
    """

    def __init__(
        self,
        config: VllmConfig,
        layer: Any,
        name: str,
        watch: StepWatch,
        on_lost: Callable[[GuestLink, GuestLostError], None],
    ) -> None:
        self._config = config
        self._layer = layer
        self._name = name
        self._watch = watch
        self._on_lost = on_lost
        self._group = layer.num_heads // layer.num_kv_heads
        self._local: list[_LocalGroup] = []
        self._remote: list[tuple[torch.Tensor, torch.Tensor, RemoteHeads]] = []
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def arrange(self, remote: Mapping[Sequence[int], RemoteHeads]) -> None:
        """Say which KV heads are where; between two steps. Nothing remote: the layer is whole."""
        away = {head for heads in remote for head in heads}
        here = [head for head in range(self._layer.num_kv_heads) if head not in away]
        if not away:
            self._layer.impl = self.inner
            self._local, self._remote = [], []
            return
        self._local = [
            _LocalGroup(self._config, self._layer, self.inner, self._name, first, count)
            for first, count in spans(here)
        ]
        self._remote = [
            (torch.tensor(sorted(heads)), self._query_heads(heads), where)
            for heads, where in remote.items()
        ]
        self._layer.impl = self

    def _query_heads(self, heads: Sequence[int]) -> torch.Tensor:
        return torch.tensor(
            [h * self._group + i for h in sorted(heads) for i in range(self._group)]
        )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the new keys and values of the heads that are here; keep the others' to send."""
        self._new = key, value
        for part in self._local:
            part.impl.do_kv_cache_update(
                layer,
                key[:, part.kv_heads].contiguous(),
                value[:, part.kv_heads].contiguous(),
                kv_cache[:, part.kv_heads],
                slot_mapping,
            )

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
        """As vLLM's: fills ``output`` ``[num_tokens, num_heads, head_size]``."""
        if attn_metadata is None or self._new is None:
            return output
        num_tokens = attn_metadata.num_actual_tokens
        new_key, new_value = (tensor[:num_tokens] for tensor in self._new)
        self._new = None
        posted = self._post(query[:num_tokens], new_key, new_value)
        for part in self._local:
            mine = query[:num_tokens, part.query_heads].contiguous()
            own = torch.empty_like(mine)
            part.impl.forward(
                layer,
                mine,
                key,
                value,
                kv_cache[:, part.kv_heads],
                self._watch.metadata(part.builder),
                output=own,
            )
            output[:num_tokens, part.query_heads] = own
        self._collect(posted, output, num_tokens)
        return output

    def _post(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[_Posted]:
        """Ask each guest once. Whatever else it has of this layer is asked when it has answered.

        Two large questions to one guest would wait for each other: it cannot read the second
        while its answer to the first is not read.
        """
        posted: list[_Posted] = []
        asked: set[GuestLink] = set()
        for kv_heads, query_heads, where in self._remote:
            parts = query[:, query_heads], key[:, kv_heads], value[:, kv_heads]
            if where.link in asked:
                posted.append(_Posted(query_heads, where, parts))
                continue
            asked.add(where.link)
            try:
                where.post(*parts)
                posted.append(_Posted(query_heads, where))
            except GuestLostError as lost:
                self._on_lost(where.link, lost)
                posted.append(_Posted(query_heads, None))
        return posted

    def _collect(self, posted: Sequence[_Posted], output: torch.Tensor, num_tokens: int) -> None:
        for query_heads, where, parts in posted:
            output[:num_tokens, query_heads] = 0
            if where is None:
                continue
            try:
                if parts is not None:
                    where.post(*parts)
                output[:num_tokens, query_heads] = where.collect()
            except GuestLostError as lost:
                self._on_lost(where.link, lost)
