"""Context of the step under way: its batch, the blocks that it writes, its attention metadata.

Guests are sent the values that metadata is built from, since built metadata depends on the number
of heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.runner.attention import CommonAttentionMetadata
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, Written

_FIELDS = tuple(field.name for field in dataclasses.fields(CommonAttentionMetadata))
Numbers = npt.NDArray[np.int64]
_CAN_TRAVEL = (bool, int, float, str, torch.Tensor, np.ndarray)


def fields_of(common: CommonAttentionMetadata, block_size: int) -> dict[str, Any]:
    """Return all fields that are set, the block table and slot mapping cut to the used part."""
    found = {name: getattr(common, name) for name in _FIELDS}
    fields = {name: value for name, value in found.items() if isinstance(value, _CAN_TRAVEL)}
    num_columns = -(-common.max_seq_len // block_size)
    fields["block_table_tensor"] = common.block_table_tensor[:, :num_columns]
    fields["slot_mapping"] = common.slot_mapping[: common.num_actual_tokens]
    return fields


def common_from(fields: Mapping[str, Any]) -> CommonAttentionMetadata:
    """Return the metadata as the host's builder got it, without fields that this vLLM lacks."""
    known = {name: value for name, value in fields.items() if name in _FIELDS}
    return CommonAttentionMetadata(**known)


def _written(slots: torch.Tensor, block_size: int) -> Written:
    numbers = slots.numpy()
    # Padding is negative, and stays so.
    blocks = numbers // block_size
    is_last = numbers % block_size == block_size - 1
    return blocks[blocks >= 0], blocks[is_last & (blocks >= 0)]


def _copied(slots: torch.Tensor, block_size: int) -> Callable[[], Written]:
    """Begin to copy a step's slots from the GPU; return what waits for them.

    The engine prepares a step while the GPU computes the one before: a copy that it waits for here
    would end that overlap in every step.
    """
    copy, is_copied = slots.to("cpu", non_blocking=True), torch.cuda.Event()
    is_copied.record()

    def read() -> Written:
        is_copied.synchronize()
        return _written(copy, block_size)

    return read


def lengths_of(common: CommonAttentionMetadata) -> tuple[Numbers, Numbers]:
    """Return the batch's ``query_start_loc`` and ``seq_lens``, int64, without waiting for a GPU.

    vLLM's bound of ``seq_lens`` is exact but for speculative decoding, with which nothing moves.
    """
    lengths = common.seq_lens_cpu_upper_bound
    lengths = common.seq_lens.cpu() if lengths is None else lengths
    starts = common.query_start_loc_cpu[: common.num_reqs + 1]
    return starts.numpy().astype(np.int64), lengths[: common.num_reqs].numpy().astype(np.int64)


class StepContext:
    """Record of the current step, taken from the metadata builder of one attention group.

    Attributes:
        step_id: Counter of the steps and the parts of steps.
        common: The batch of the step under way, or of a part of it; None before the first.
    """

    def __init__(self, builder: Any, block_size_tokens: int, num_blocks: int) -> None:
        self.dirty_blocks = DirtyBlockTracker(num_blocks)
        self.step_id = 0
        self.common: CommonAttentionMetadata | None = None
        self.block_size = block_size_tokens
        self._fields: dict[str, Any] | None = None
        self._local: dict[int, Any] = {}
        self._build = runner_hooks.wrap_build(builder, self._begin)

    def _begin(self, common: CommonAttentionMetadata) -> None:
        self.dirty_blocks.step_ended()
        self.common = common
        self._describe_anew()
        slots = common.slot_mapping[: common.num_actual_tokens]
        if slots.is_cuda:
            self.dirty_blocks.mark_later(_copied(slots, self.block_size))
        else:
            self.dirty_blocks.mark(*_written(slots, self.block_size))

    def _describe_anew(self) -> None:
        self.step_id += 1
        self._fields = None
        self._local.clear()

    @contextlib.contextmanager
    def part(self, common: CommonAttentionMetadata) -> Iterator[None]:
        """Describe only this part of the step under way to guests, within the context."""
        whole, self.common = self.common, common
        self._describe_anew()
        try:
            yield
        finally:
            self.common = whole
            self._describe_anew()

    @property
    def num_tokens(self) -> int:
        return self.common.num_actual_tokens if self.common is not None else 0

    def fields(self) -> dict[str, Any]:
        """Return the fields of the batch for a guest; computed once a step."""
        if self._fields is None:
            assert self.common is not None
            self._fields = fields_of(self.common, self.block_size)
        return self._fields

    def metadata_of(self, part: CommonAttentionMetadata) -> Any:
        """Return what the layers' own builder builds for a part of the batch, once a step."""
        if id(part) not in self._local:
            # The part is kept too, so that no other one of the step gets its id.
            self._local[id(part)] = self._build(0, part), part
        return self._local[id(part)][0]

    def metadata(self, builder: Any) -> Any:
        """Return the metadata that ``builder`` builds for the batch, built once a step."""
        if id(builder) not in self._local:
            self._local[id(builder)] = builder.build(0, self.common)
        return self._local[id(builder)]
