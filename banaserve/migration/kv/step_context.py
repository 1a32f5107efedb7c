"""Context of the step under way: its batch, the blocks that it writes, its attention metadata.

Guests are sent the values that metadata is built from, since built metadata depends on the number
of heads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from banaserve.engine.compat.runner import hooks as runner_hooks
from banaserve.engine.compat.runner.attention import CommonAttentionMetadata
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker

_FIELDS = tuple(field.name for field in dataclasses.fields(CommonAttentionMetadata))
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
        slots = common.slot_mapping[: common.num_actual_tokens].cpu().numpy()
        # Padding is negative, and stays so.
        blocks = slots // self.block_size
        is_last = slots % self.block_size == self.block_size - 1
        self.dirty_blocks.mark(blocks[blocks >= 0], blocks[is_last & (blocks >= 0)])

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
