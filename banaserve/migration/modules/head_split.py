"""Attention of a layer with split KV heads: some here, others in guests, outputs side by side.

``SplitAttention`` replaces an attention's implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.attention import some_heads
from banaserve.engine.compat.runner_hooks import set_implementation
from banaserve.kernels.interface import Heads
from banaserve.migration.kv.host_kv import spans
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.paged_attention import KernelsAttention, write_tokens
from banaserve.migration.rpc.guest_client import GuestClient


class Remote(NamedTuple):
    """Output of a guest for one layer and step.

    Attributes:
        kv_heads: KV heads in the guest, ascending.
        query_heads: Indices of their query heads in the layer's output, int64.
        output: ``[num_tokens, query heads, head_size]``; None if the guest is lost.
    """

    kv_heads: tuple[int, ...]
    query_heads: torch.Tensor
    output: torch.Tensor | None


class LocalHeads(Protocol):
    """The heads of one layer that are here."""

    def write(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write these heads' keys and values of ``[num_tokens, num_kv_heads, head_size]``."""
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
        """Fill the rest, after ``attend``; zero for heads whose guest is lost."""
        ...


class VllmHeads:
    """Local heads on vLLM's CPU kernels: each run of neighbours has a strided view of the KV."""

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
            # New keys and values are in the cache already.
            part.impl.forward(layer, mine, None, None, cache, metadata, output=own)
            output[:, part.query_heads] = own

    def join(self, output: torch.Tensor, remote: Sequence[Remote]) -> None:
        """See ``LocalHeads``. Outputs are copied in place: half the cost of concatenating here."""
        for part in remote:
            output[:, part.query_heads] = 0 if part.output is None else part.output


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
    """Local heads on our kernels, which attend with any heads and put all outputs side by side."""

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
        """See ``LocalHeads``.

        On a GPU all heads are written, by the kernel that writes them while all are here: that call
        may be in a CUDA graph, and the memory of heads that are away is not given back.
        """
        if self._attention.splits_only:
            self._attention.do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        elif self._here:
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
            # vLLM's metadata depends on its backend; the batch that it was made from does not.
            batch = self._step_context.common
            self._own = self._attention.attend(query, kv_cache, batch, self._heads)

    def join(self, output: torch.Tensor, remote: Sequence[Remote]) -> None:
        """See ``LocalHeads``; BanaServe Eq. 8 to 10 for heads, which are independent."""
        parts = [_zeros(output, r) if r.output is None else r.output for r in remote]
        groups = [r.kv_heads for r in remote]
        own, self._own = self._own, None
        if own is not None:
            parts, groups = [own, *parts], [self._here, *groups]
        output[:] = self._attention.kernels.concat_heads(parts, groups)


def _zeros(output: torch.Tensor, remote: Remote) -> torch.Tensor:
    return output.new_zeros(len(output), len(remote.query_heads), output.shape[2])


class HeadChannel(Protocol):
    """Channel to a guest for the attention of some heads of one layer.

    ``submit`` and ``collect`` raise ``GuestLostError`` if the guest is lost.
    """

    @property
    def link(self) -> GuestClient: ...

    def submit(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send queries and new keys and values, ``[num_tokens, heads, head_size]``."""
        ...

    def collect(self) -> torch.Tensor:
        """Return the heads' attention output, ``[num_tokens, query heads, head_size]``."""
        ...


class _Away(NamedTuple):
    """Heads that are in one guest; ``query_heads`` and ``kv_heads`` are indices in the layer."""

    heads: tuple[int, ...]
    kv_heads: torch.Tensor
    query_heads: torch.Tensor
    where: HeadChannel


class _Submitted(NamedTuple):
    """Heads whose output is awaited.

    Attributes:
        is_lost: True if the guest of the heads is lost.
        parts: Query, key and value that are still to be sent to the guest; None if sent.
    """

    away: _Away
    is_lost: bool = False
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class SplitAttention:
    """Attention with heads in several places: outputs are put side by side, nothing is merged.

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
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def arrange(self, remote: Mapping[Sequence[int], HeadChannel]) -> None:
        """Set which guests have which KV heads, between two steps; empty: the layer is whole."""
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
        """Write the new keys and values of the heads here."""
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
        """Fill ``output`` ``[num_tokens, num_heads, head_size]``, as vLLM's implementation does."""
        local = self._local
        if attn_metadata is None or local is None:
            return output
        num_tokens = attn_metadata.num_actual_tokens
        query, filled = query[:num_tokens], output[:num_tokens]
        submitted = self._submit(query, key[:num_tokens], value[:num_tokens])
        local.attend(layer, query, kv_cache, attn_metadata, filled)
        local.join(filled, self._collect(submitted))
        return output

    def _submit(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[_Submitted]:
        """Submit to each guest once; its further heads of this layer follow after its answer.

        Two large requests to one guest would wait for each other: the guest cannot read the
        second while its answer to the first is not read.
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
        """Wait for the outputs of all guests, even if one of the guests is lost."""
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
