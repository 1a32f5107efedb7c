"""Attention of a layer with split KV heads: some here, others in guests, outputs side by side.

``SplitAttention`` takes the place of an attention's implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from banaserve.engine.vllm.compat.attention import some_heads
from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.compat.runner_hooks import set_implementation
from banaserve.engine.vllm.migration.kv.host_kv import spans
from banaserve.engine.vllm.migration.kv.step_context import StepContext
from banaserve.engine.vllm.migration.modules.paged_attention import KernelsAttention, write_tokens
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.errors import GuestLostError
from banaserve.kernels.interface import Heads


class Remote(NamedTuple):
    """Output of a guest for one layer and step.

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
        step_context: StepContext,
    ) -> None:
        self._groups = [
            _Group(config, layer, inner, name, first, count) for first, count in spans(here)
        ]
        self._step_context = step_context

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
            metadata = self._step_context.metadata(part.builder)
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
        self.impl, self.builder = some_heads(config, layer, inner, name, count)


class KernelsHeads:
    """Our kernels: they attend with any heads of the layer, and put all outputs side by side."""

    def __init__(
        self,
        layer: Any,
        attention: KernelsAttention,
        here: Sequence[int],
        step_context: StepContext,
    ) -> None:
        self._attention = attention
        self._step_context = step_context
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
            batch = self._step_context.common
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


class HeadChannel(Protocol):
    """Steps of some heads of one layer that run elsewhere: what split attention asks of them.

    ``submit`` and ``collect`` raise ``GuestLostError`` where the guest is lost.
    """

    @property
    def link(self) -> GuestClient: ...

    def submit(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send queries and new keys and values, ``[num_tokens, heads, head_size]``."""
        ...

    def collect(self) -> torch.Tensor:
        """Their attention's output, ``[num_tokens, query heads, head_size]``."""
        ...


class _Away(NamedTuple):
    """Some heads that are in one guest; ``query_heads`` and ``kv_heads`` are their places."""

    heads: tuple[int, ...]
    kv_heads: torch.Tensor
    query_heads: torch.Tensor
    where: HeadChannel


class _Submitted(NamedTuple):
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
        step_context: StepContext,
        on_lost: Callable[[GuestClient, GuestLostError], None],
    ) -> None:
        self._config = config
        self._layer = layer
        self._name = name
        self._step_context = step_context
        self._on_lost = on_lost
        self._group = layer.num_heads // layer.num_kv_heads
        self._local: LocalHeads | None = None
        self._remote: list[_Away] = []
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def arrange(self, remote: Mapping[Sequence[int], HeadChannel]) -> None:
        """Say which KV heads are where; between two steps. Nothing remote: the layer is whole."""
        away = {head for heads in remote for head in heads}
        here = [head for head in range(self._layer.num_kv_heads) if head not in away]
        if not away:
            set_implementation(self._layer, self.inner)
            self._local, self._remote = None, []
            return
        self._local = self._stay(here)
        self._remote = [
            _Away(tuple(heads), torch.tensor(heads), self._query_heads(heads), where)
            for heads, where in ((sorted(heads), where) for heads, where in remote.items())
        ]
        set_implementation(self._layer, self)

    def _stay(self, here: Sequence[int]) -> LocalHeads:
        if isinstance(self.inner, KernelsAttention):
            return KernelsHeads(self._layer, self.inner, here, self._step_context)
        return VllmHeads(
            self._config, self._layer, self.inner, self._name, here, self._step_context
        )

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
        submitted = self._submit(query, new_key, new_value)
        local.attend(layer, query, kv_cache, attn_metadata, filled)
        local.join(filled, self._collect(submitted))
        return output

    def _submit(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[_Submitted]:
        """Ask each guest once. Whatever else it has of this layer is asked when it has answered.

        Two large questions to one guest would wait for each other: it cannot read the second
        while its answer to the first is not read.
        """
        submitted: list[_Submitted] = []
        asked: set[GuestClient] = set()
        for away in self._remote:
            parts = query[:, away.query_heads], key[:, away.kv_heads], value[:, away.kv_heads]
            link = away.where.link
            if link in asked:
                submitted.append(_Submitted(away, parts=parts))
                continue
            asked.add(link)
            try:
                away.where.submit(*parts)
                submitted.append(_Submitted(away))
            except GuestLostError as lost:
                self._on_lost(link, lost)
                submitted.append(_Submitted(away, is_lost=True))
        return submitted

    def _collect(self, submitted: Sequence[_Submitted]) -> list[Remote]:
        """Waits for all of them, whatever becomes of one."""
        return [Remote(p.away.heads, p.away.query_heads, self._output(p)) for p in submitted]

    def _output(self, submitted: _Submitted) -> torch.Tensor | None:
        if submitted.is_lost:
            return None
        where = submitted.away.where
        try:
            if submitted.parts is not None:
                where.submit(*submitted.parts)
            return where.collect()
        except GuestLostError as lost:
            self._on_lost(where.link, lost)
            return None
