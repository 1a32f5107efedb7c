"""Takes the place of an attention's implementation: some KV heads here, others in guests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from vllm.config import VllmConfig

from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.kernels_attention import KernelsAttention
from banaserve.engine.vllm.migration.local_heads import (
    KernelsHeads,
    LocalHeads,
    Remote,
    VllmHeads,
)
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.errors import GuestLostError


class RemoteHeads(Protocol):
    """Some heads of one layer in one guest."""

    @property
    def link(self) -> GuestLink: ...

    def post(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None: ...

    def collect(self) -> torch.Tensor: ...


class _Away(NamedTuple):
    """Some heads that are in one guest; ``query_heads`` and ``kv_heads`` are their places."""

    heads: tuple[int, ...]
    kv_heads: torch.Tensor
    query_heads: torch.Tensor
    where: RemoteHeads


class _Posted(NamedTuple):
    """Heads whose output is awaited.

    Attributes:
        is_lost: Whether their guest is.
        parts: Query, key and value, where the guest is still to be asked.
    """

    away: _Away
    is_lost: bool = False
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


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
        self._local: LocalHeads | None = None
        self._remote: list[_Away] = []
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
            self._local, self._remote = None, []
            return
        self._local = self._stay(here)
        self._remote = [
            _Away(tuple(heads), torch.tensor(heads), self._query_heads(heads), where)
            for heads, where in ((sorted(heads), where) for heads, where in remote.items())
        ]
        self._layer.impl = self

    def _stay(self, here: Sequence[int]) -> LocalHeads:
        if isinstance(self.inner, KernelsAttention):
            return KernelsHeads(self._layer, self.inner, here, self._watch)
        return VllmHeads(self._config, self._layer, self.inner, self._name, here, self._watch)

    def _query_heads(self, heads: Sequence[int]) -> torch.Tensor:
        return torch.tensor([h * self._group + i for h in heads for i in range(self._group)])

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
        if self._local is not None:
            self._local.write(layer, key, value, kv_cache, slot_mapping)

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
        local = self._local
        if attn_metadata is None or self._new is None or local is None:
            return output
        num_tokens = attn_metadata.num_actual_tokens
        query, filled = query[:num_tokens], output[:num_tokens]
        new_key, new_value = (tensor[:num_tokens] for tensor in self._new)
        self._new = None
        posted = self._post(query, new_key, new_value)
        local.attend(layer, query, kv_cache, attn_metadata, filled)
        local.join(filled, self._collect(posted))
        return output

    def _post(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[_Posted]:
        """Ask each guest once. Whatever else it has of this layer is asked when it has answered.

        Two large questions to one guest would wait for each other: it cannot read the second
        while its answer to the first is not read.
        """
        posted: list[_Posted] = []
        asked: set[GuestLink] = set()
        for away in self._remote:
            parts = query[:, away.query_heads], key[:, away.kv_heads], value[:, away.kv_heads]
            link = away.where.link
            if link in asked:
                posted.append(_Posted(away, parts=parts))
                continue
            asked.add(link)
            try:
                away.where.post(*parts)
                posted.append(_Posted(away))
            except GuestLostError as lost:
                self._on_lost(link, lost)
                posted.append(_Posted(away, is_lost=True))
        return posted

    def _collect(self, posted: Sequence[_Posted]) -> list[Remote]:
        """Waits for all of them, whatever becomes of one."""
        return [Remote(p.away.heads, p.away.query_heads, self._output(p)) for p in posted]

    def _output(self, posted: _Posted) -> torch.Tensor | None:
        if posted.is_lost:
            return None
        where = posted.away.where
        try:
            if posted.parts is not None:
                where.post(*posted.parts)
            return where.collect()
        except GuestLostError as lost:
            self._on_lost(where.link, lost)
            return None
