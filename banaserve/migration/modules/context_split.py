"""Attention over a split sequence: newer KV blocks here, older ones in a guest, results merged.

``ContextAttention`` replaces an attention's implementation; ``split_context`` divides the batch of
a step.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.attention import CommonAttentionMetadata
from banaserve.kernels.interface import Batch, PartialAttention
from banaserve.kernels.registry import pick
from banaserve.migration.kv.dirty_blocks import RemoteBlocks
from banaserve.migration.kv.remote_kv import UnitLocation
from banaserve.migration.kv.step_context import StepContext, lengths_of
from banaserve.migration.modules.paged_attention import Pages
from banaserve.migration.modules.split_attention import (
    AttentionStep,
    GuestQuestion,
    GuestQuestions,
    OnLost,
    RemoteAttention,
    SplitAttention,
)
from banaserve.migration.ranks import Ranks

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
    starts, seq_lens = lengths_of(common)
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
        "seq_lens_cpu_upper_bound": _int32(seq_lens[rest]),
        "num_reqs": len(rest),
        "num_actual_tokens": int(asking.sum()),
        "max_query_len": int(asking.max()),
        "max_seq_len": int(seq_lens[rest].max()),
        "block_table_tensor": common.block_table_tensor[which],
        "slot_mapping": common.slot_mapping[_rows(starts, rest)],
    }
    return replace(common, **changed)


class RemoteContext(RemoteAttention):
    """Steps over older blocks of some layers in one guest; the answer has a log-sum-exp too.

    The queries are those of the sequences with blocks in the guest. The description has
    ``block_table``, ``query_start`` and ``num_tokens`` of these sequences: the fields of
    ``kernels.interface.Batch`` that are needed without a mask.
    """

    def __init__(
        self, residence: UnitLocation, away: RemoteBlocks, step_context: StepContext
    ) -> None:
        super().__init__(residence, step_context)
        self._away = away
        self._planned_step = 0
        self._plan: ContextPlan | None = None

    def plan(self) -> ContextPlan | None:
        """Return the division of the step under way, made once for all layers."""
        step_context = self._step_context
        if self._planned_step != step_context.step_id:
            assert step_context.common is not None
            self._plan = split_context(step_context.common, step_context.block_size, self._away)
            self._planned_step = step_context.step_id
        return self._plan

    def _description(self) -> Mapping[str, Any]:
        assert self._plan is not None
        batch = self._plan.remote
        return {
            "block_table": batch.block_table,
            "query_start": batch.query_start,
            "num_tokens": batch.range_end,
        }

    def collect_parts(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Return the output for ``query``, in float32, and its log-sum-exp."""
        wanted = query.float()  # made only now: until the answer comes, nothing needs its memory
        return self.collect(wanted, wanted[..., 0])


class ContextAttention(SplitAttention):
    """Attention over split sequences: host and guest attend over their blocks; results are merged.

    BanaServe Eq. 10 in corrected form: a part is weighted by the exponential of its log-sum-exp,
    where the paper adds outputs that were normalised by different denominators.

    New keys and values are written by the replaced implementation: new blocks are always here.

    Args:
        pages: Attention over the pages of the layer's KV.
        ranks: Tensor-parallel ranks of the engine; each splits the same blocks of its own heads.
    """

    def __init__(
        self,
        layer: Any,
        name: str,
        step_context: StepContext,
        on_lost: OnLost,
        pages: Pages,
        ranks: Ranks,
    ) -> None:
        super().__init__(layer, name, step_context, on_lost)
        self._pages = pages
        self._ranks = ranks
        self._remote: RemoteContext | None = None

    def arrange(self, remote: RemoteContext | None) -> None:
        """Set the guest with older blocks, between two steps; None: all blocks are here."""
        self._remote = remote
        self._install(self._layer, remote is not None)

    def _leaves_to_inner(self) -> bool:
        return self._remote is None or self._remote.plan() is None

    def _fill(self, output: torch.Tensor, step: AttentionStep) -> None:
        remote = self._remote
        assert remote is not None
        plan = remote.plan()
        assert plan is not None
        asking = step.query[plan.rows]
        submit = functools.partial(remote.submit, self._name, asking)
        collect = functools.partial(remote.collect_parts, asking)
        asked = GuestQuestions([GuestQuestion(remote.link, submit, collect)])
        if plan.others is not None:
            rows = plan.other_rows
            mine = step.query[rows], step.key[rows], step.value[rows], step.kv_cache
            own = torch.empty_like(mine[0])
            others = self._step_context.metadata_of(plan.others)
            self.inner.forward(self._layer, *mine, others, output=own)
            output[rows] = own
        own_blocks = step.kv_cache, plan.local, self.inner.scale
        parts = [self._pages.attend(asking, *own_blocks, causal=True)]
        (answer,) = asked.answers()
        lost = answer if isinstance(answer, GuestLostError) else None
        parts += [] if isinstance(answer, GuestLostError) else [PartialAttention(*answer)]
        if (lost := self._ranks.lost(lost, remote.link.give_up)) is not None:
            self._on_lost(remote.link, lost)  # the step's output is dropped
        merged = pick(output.device).kernels.merge(parts)
        output[plan.rows] = merged.output.to(output.dtype)
