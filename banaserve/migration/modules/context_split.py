"""Attention over a split sequence: newer KV blocks here, older ones in a guest, results merged.

``ContextAttention`` replaces an attention's implementation; ``split_context`` divides the batch of
a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.attention import CommonAttentionMetadata
from banaserve.engine.compat.runner_hooks import set_implementation
from banaserve.kernels.interface import Batch, PartialAttention
from banaserve.kernels.registry import pick
from banaserve.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.migration.kv.step_context import StepContext
from banaserve.migration.modules.paged_attention import Pages
from banaserve.migration.ranks import Ranks
from banaserve.migration.rpc.guest_client import GuestClient

_Ints = npt.NDArray[np.int64]
_Marks = npt.NDArray[np.bool_]


class ContextPlan(NamedTuple):
    """Division of one step of the layers whose older blocks are in one guest.

    Attributes:
        rows: Indices of the tokens of sequences with blocks in the guest, int64.
        local: Batch of these sequences' blocks here; tokens in the guest are not counted.
        remote: Batch of these sequences' blocks in the guest; all these blocks precede the first
            query, so there is no mask.
        other_rows: Indices of the other tokens, int64.
        others: Batch of the other tokens; None if there are none.
    """

    rows: torch.Tensor
    local: Batch
    remote: Batch
    other_rows: torch.Tensor
    others: CommonAttentionMetadata | None


def split_context(
    common: CommonAttentionMetadata, block_size: int, away: RemoteBlocks
) -> ContextPlan | None:
    """Divide a step between the host and a guest; None if the guest has no block of the step.

    Keys contain their positions, and all blocks in the guest precede the queries of the step. So
    the blocks of either side may be counted as if they were contiguous.
    """
    table: _Ints = common.block_table_tensor[: common.num_reqs].cpu().numpy().astype(np.int64)
    seq_lens = common.seq_lens[: common.num_reqs].cpu().numpy().astype(np.int64)
    starts = common.query_start_loc[: common.num_reqs + 1].cpu().numpy().astype(np.int64)
    asking = np.diff(starts)
    used = np.arange(table.shape[1]) < -(-seq_lens // block_size)[:, None]
    is_away: _Marks = away.among(np.where(used, table, 0)) & used
    split = np.flatnonzero(is_away.any(1) & (asking > 0))
    if not len(split):
        return None
    first_asking = (seq_lens - asking)[split]
    behind = (is_away[split] * (np.arange(table.shape[1]) + 1)).max(1) * block_size
    assert (behind <= first_asking).all(), "a block that is being written is in a guest"
    hidden = is_away[split].sum(1) * block_size
    rest = np.setdiff1d(np.arange(common.num_reqs), split)
    return ContextPlan(
        _rows(starts, split),
        _select(
            table[split],
            used[split] & ~is_away[split],
            asking[split],
            first_asking - hidden,
            seq_lens[split] - hidden,
        ),
        _select(table[split], is_away[split], asking[split], hidden, hidden),
        _rows(starts, rest),
        _without(common, starts, seq_lens, rest),
    )


def _rows(starts: _Ints, seqs: _Ints) -> torch.Tensor:
    ranges = [np.arange(starts[s], starts[s + 1]) for s in seqs]
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *ranges]))


def _select(
    table: _Ints, chosen: _Marks, asking: _Ints, first_asking: _Ints, num_tokens: _Ints
) -> Batch:
    """Return a batch of each row's chosen blocks, which are moved to the front of the row."""
    width = int(chosen.sum(1).max())
    order = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
    return Batch(
        block_table=_int32(np.take_along_axis(np.where(chosen, table, 0), order, 1)),
        query_start=_int32(np.concatenate([[0], np.cumsum(asking)])),
        query_position=_int32(first_asking),
        range_start=torch.zeros(len(asking), dtype=torch.int32),
        range_end=_int32(num_tokens),
    )


def _int32(values: npt.NDArray[np.integer]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))


def _without(
    common: CommonAttentionMetadata, starts: _Ints, seq_lens: _Ints, rest: _Ints
) -> CommonAttentionMetadata | None:
    """Return the batch with only the sequences ``rest``; None if they have no tokens."""
    asking = np.diff(starts)[rest]
    if not asking.sum():
        return None
    which = torch.from_numpy(rest)
    query_start = _int32(np.concatenate([[0], np.cumsum(asking)]))
    changed = {
        "query_start_loc": query_start.to(common.query_start_loc.device),
        "query_start_loc_cpu": query_start,
        "seq_lens": common.seq_lens[which],
        "num_reqs": len(rest),
        "num_actual_tokens": int(asking.sum()),
        "max_query_len": int(asking.max()),
        "max_seq_len": int(seq_lens[rest].max()),
        "block_table_tensor": common.block_table_tensor[which],
        "slot_mapping": common.slot_mapping[_rows(starts, rest)],
    }
    return replace(common, **changed)


class ContextChannel(Protocol):
    """Channel to a guest for attention over older blocks of split sequences.

    ``submit`` and ``collect`` raise ``GuestLostError`` if the guest is lost.
    """

    @property
    def link(self) -> GuestClient: ...

    def plan(self) -> ContextPlan | None:
        """Return the division of the step under way, made once for all layers."""
        ...

    def submit(self, name: str, query: torch.Tensor) -> None:
        """Send queries ``[num_tokens, num_heads, head_size]`` of one layer."""
        ...

    def collect(self, query: torch.Tensor) -> PartialAttention:
        """Return the attention over the guest's blocks, float32."""
        ...


class ContextAttention:
    """Attention over split sequences: host and guest attend over their blocks; results are merged.

    BanaServe Eq. 10 in corrected form: a part is weighted by the exponential of its log-sum-exp,
    where the paper adds outputs that were normalised by different denominators.

    New keys and values are written by the replaced implementation: new blocks are always here.

    Args:
        layer: vLLM's attention module, whose ``impl`` this object becomes.
        on_lost: Called when the guest is lost in the middle of a step.
        pages: Attention over the pages of the layer's KV.
        ranks: Tensor-parallel ranks of the engine; each splits the same blocks of its own heads.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        step_context: StepContext,
        on_lost: Callable[[GuestClient, GuestLostError], None],
        pages: Pages,
        ranks: Ranks,
    ) -> None:
        self._pages = pages
        self._ranks = ranks
        self._layer = layer
        self._name = name
        self._step_context = step_context
        self._on_lost = on_lost
        self._remote: ContextChannel | None = None
        self.inner = layer.impl

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def arrange(self, remote: ContextChannel | None) -> None:
        """Set the guest with older blocks, between two steps; None: all blocks are here."""
        self._remote = remote
        set_implementation(self._layer, self.inner if remote is None else self)

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
        remote = self._remote
        plan = remote.plan() if remote is not None and attn_metadata is not None else None
        if remote is None or plan is None:
            arguments = layer, query, key, value, kv_cache, attn_metadata
            whole: torch.Tensor = self.inner.forward(*arguments, output=output, **kwargs)
            return whole
        asking = query[plan.rows]
        lost = _lost_in(lambda: remote.submit(self._name, asking))
        if plan.others is not None:
            rows = plan.other_rows
            mine = query[rows], key[rows], value[rows], kv_cache
            own = torch.empty_like(mine[0])
            metadata = self._step_context.metadata_of(plan.others)
            self.inner.forward(layer, *mine, metadata, output=own)
            output[rows] = own
        scale = self.inner.scale
        parts = [self._pages.attend(asking, kv_cache, plan.local, scale, causal=True)]
        lost = lost or _lost_in(lambda: parts.append(remote.collect(asking)))
        if (lost := self._ranks.lost(lost, remote.link.give_up)) is not None:
            self._on_lost(remote.link, lost)  # the step's output is dropped
        merged = pick(output.device).kernels.merge(parts)
        output[plan.rows] = merged.output.to(output.dtype)
        return output


def _lost_in(question: Callable[[], None]) -> GuestLostError | None:
    """Return the error if the guest is lost when it is asked; None otherwise."""
    try:
        question()
    except GuestLostError as lost:
        return lost
    return None
