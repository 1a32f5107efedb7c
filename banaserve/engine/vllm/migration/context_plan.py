"""Which tokens of a batch ask a guest for older blocks, and which blocks both ends look at."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.engine.vllm.migration.away_blocks import AwayBlocks
from banaserve.kernels.interface import Batch

_Ints = npt.NDArray[np.int64]
_Marks = npt.NDArray[np.bool_]


class ContextPlan(NamedTuple):
    """One step of the layers whose older blocks are in one guest.

    Attributes:
        rows: Tokens of sequences with blocks in the guest, int64.
        local: Their blocks here; tokens are counted without those in the guest.
        remote: Their blocks in the guest: all before the first token that asks, so no mask.
        other_rows: The other tokens.
        others: The batch of the other tokens; None where there are none.
    """

    rows: torch.Tensor
    local: Batch
    remote: Batch
    other_rows: torch.Tensor
    others: CommonAttentionMetadata | None


def split_context(
    common: CommonAttentionMetadata, block_size: int, away: AwayBlocks
) -> ContextPlan | None:
    """Divide a step between the host and a guest; None where the guest has nothing of it.

    Keys carry their positions, and whatever is in the guest lies before the tokens that ask. So
    the blocks of either end may be counted as if they lay together.
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
    """The chosen blocks of each row, at its front."""
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
    """The batch with none but the sequences ``rest``."""
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
