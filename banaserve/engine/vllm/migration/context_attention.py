"""Takes the place of an attention's implementation: newer blocks here, older ones in a guest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from banaserve.engine.vllm.migration.context_plan import ContextPlan
from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.kv_pages import Pages
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.errors import GuestLostError
from banaserve.kernels.interface import Part
from banaserve.kernels.registry import pick


class RemoteContext(Protocol):
    """Older blocks of some layers in one guest."""

    @property
    def link(self) -> GuestLink: ...

    def plan(self) -> ContextPlan | None: ...

    def post(self, name: str, query: torch.Tensor) -> None: ...

    def collect(self, query: torch.Tensor) -> Part: ...


class ContextAttention:
    """A sequence is split: both ends attend over their blocks, and the parts are merged.

    BanaServe Eq. 10 in corrected form: a part counts by the exponential of its log-sum-exp, where
    the paper adds outputs that were normalised by different denominators.

    New keys and values are written by what stands behind, for new blocks are always here.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes.
        on_lost: Called when the guest is lost in the middle of a step.
        pages: How its KV is read.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        watch: StepWatch,
        on_lost: Callable[[GuestLink, GuestLostError], None],
        pages: Pages,
    ) -> None:
        self._pages = pages
        self._layer = layer
        self._name = name
        self._watch = watch
        self._on_lost = on_lost
        self._remote: RemoteContext | None = None
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def arrange(self, remote: RemoteContext | None) -> None:
        """Say which guest has older blocks; between two steps. None: all are here."""
        self._remote = remote
        self._layer.impl = self.inner if remote is None else self

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
        remote = self._remote
        plan = remote.plan() if remote is not None and attn_metadata is not None else None
        if remote is None or plan is None:
            arguments = layer, query, key, value, kv_cache, attn_metadata
            whole: torch.Tensor = self.inner.forward(*arguments, output=output, **kwargs)
            return whole
        asking = query[plan.rows]
        posted = self._ask(remote, lambda: remote.post(self._name, asking))
        if plan.others is not None:
            rows = plan.other_rows
            mine = query[rows], key[rows], value[rows], kv_cache
            own = torch.empty_like(mine[0])
            metadata = self._watch.metadata_of(plan.others)
            self.inner.forward(layer, *mine, metadata, output=own)
            output[rows] = own
        scale = self.inner.scale
        parts = [self._pages.attend(asking, kv_cache, plan.local, scale, causal=True)]
        if posted:
            self._ask(remote, lambda: parts.append(remote.collect(asking)))
        merged = pick(output.device).kernels.merge(parts)
        output[plan.rows] = merged.output.to(output.dtype)
        return output

    def _ask(self, remote: RemoteContext, question: Callable[[], None]) -> bool:
        """Whether the guest has taken it; where it is lost, the step's output is dropped."""
        try:
            question()
        except GuestLostError as lost:
            self._on_lost(remote.link, lost)
            return False
        return True
