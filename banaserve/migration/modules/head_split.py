"""Attention of a layer with split KV heads: some here, others in guests, outputs side by side.

``SplitAttention`` replaces an attention's implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.runner.attention import some_heads
from banaserve.kernels.interface import Heads
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.kv.unit_location import UnitLocation
from banaserve.migration.modules.guest_questions import GuestQuestion, GuestQuestions
from banaserve.migration.modules.paged_attention import KernelsAttention, write_tokens
from banaserve.migration.modules.replaced_attention import AttentionStep, ReplacedAttention
from banaserve.migration.ranges import spans
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.migration.rpc.tensors import to_device


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
    """The heads here on our kernels, which attend with any heads."""

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
        """See ``VllmHeads``.

        On a GPU all heads are written, by the kernel that writes them while all are here: that call
        may be in a CUDA graph, and the memory of heads that are away is not given back.
        """
        if self._attention.splits_only:
            self._attention.do_kv_cache_update(self._layer, key, value, kv_cache, slots)
        elif self._here:
            write_tokens(kv_cache, key, value, slots, self._here)

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor) -> None:
        """See ``VllmHeads``."""
        if self._here:
            # vLLM's metadata depends on its backend; the batch that it was made from does not.
            batch = self._step_context.common
            own = self._attention.attend(query, kv_cache, batch, self._heads)
            output[:, self._query_heads] = own


class RunHeads(messages.Run, frozen=True, tag=True):
    """Request for one step of heads of one layer; the first tensors are query, key and value.

    Attributes:
        step_id: Id of the step; ``step`` is None if this guest has the step's metadata already.
        name: Name of the attention on the host.
    """

    step_id: int
    name: str
    step: dict[str, Any] | None


class RemoteHeads:
    """Steps of some heads of one layer in one guest.

    ``submit`` and ``collect`` raise ``GuestLostError`` if the guest is lost.
    """

    def __init__(self, residence: UnitLocation, name: str, step_context: StepContext) -> None:
        self._residence = residence
        self._name = name
        self._step_context = step_context
        self._query: torch.Tensor | None = None

    @property
    def link(self) -> GuestClient:
        return self._residence.link

    def submit(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Send queries and new keys and values, ``[num_tokens, heads, head_size]``."""
        residence, step_context = self._residence, self._step_context
        bundle = self.link.bundle()
        for tensor in (query, key, value):
            bundle.put(tensor)
        self._query = query
        link = residence.link
        step = (
            bundle.put_all(step_context.fields())
            if link.described_step != step_context.step_id
            else None
        )
        link.described_step = step_context.step_id
        request = RunHeads(
            residence.unit_id, residence.working_epoch, step_context.step_id, self._name, step
        )
        link.submit(request, bundle)

    def collect(self) -> torch.Tensor:
        """Return the heads' attention output, ``[num_tokens, query heads, head_size]``."""
        query, self._query = self._query, None
        assert query is not None
        outputs = self.link.collect(self._step_context.num_tokens)
        output = self.link.check_shape(outputs[0] if outputs else None, query)
        return to_device(output, query.device)


class _Away(NamedTuple):
    """Heads that are in one guest; ``query_heads`` and ``kv_heads`` are indices in the layer."""

    kv_heads: torch.Tensor
    query_heads: torch.Tensor
    where: RemoteHeads

    def question(self, step: AttentionStep) -> GuestQuestion[torch.Tensor]:
        """Return the question of a step of the whole layer."""
        new = step.key[:, self.kv_heads], step.value[:, self.kv_heads]
        submit = functools.partial(self.where.submit, step.query[:, self.query_heads], *new)
        return GuestQuestion(self.where.link, submit, self.where.collect)


class SplitAttention(ReplacedAttention):
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
        super().__init__(layer)
        self._layer = layer
        self._config = config
        self._name = name
        self._step_context = step_context
        self._on_lost = on_lost
        self._local: VllmHeads | KernelsHeads | None = None
        self._remote: list[_Away] = []

    def arrange(self, remote: Mapping[Sequence[int], RemoteHeads]) -> None:
        """Set which guests have which KV heads, between two steps; empty: the layer is whole."""
        away = {head for heads in remote for head in heads}
        here = [head for head in range(self._layer.num_kv_heads) if head not in away]
        self._local = self._stay(here) if away else None
        self._remote = [
            _Away(index_of(self._layer, heads), query_heads(self._layer, heads), where)
            for heads, where in ((sorted(heads), where) for heads, where in remote.items())
        ]
        self._install(self._layer, bool(away))

    def _stay(self, here: Sequence[int]) -> VllmHeads | KernelsHeads:
        if isinstance(self.inner, KernelsAttention):
            return KernelsHeads(self._layer, self.inner, here, self._step_context)
        return VllmHeads(
            self._config, self._layer, self.inner, self._name, here, self._step_context
        )

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
            self._local.write(key, value, kv_cache, slot_mapping)

    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        local, remote = self._local, self._remote  # a guest that is lost changes them
        assert local is not None
        asked = GuestQuestions([one.question(step) for one in remote])
        local.attend(step.query, step.kv_cache, output)
        for away, answer in zip(remote, asked.answers(), strict=True):
            if isinstance(answer, GuestLostError):
                self._on_lost(away.where.link, answer)
                output[:, away.query_heads] = 0  # finite: the step's output is dropped
            else:
                # In place: half the cost of concatenating on a CPU.
                output[:, away.query_heads] = answer
