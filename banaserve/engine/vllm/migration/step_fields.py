"""The batch's attention metadata as values that a guest rebuilds its own from.

Built metadata depends on the number of heads, so what travels is what it is built from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

_FIELDS = tuple(field.name for field in dataclasses.fields(CommonAttentionMetadata))
_NAMES = frozenset(_FIELDS)
_CAN_TRAVEL = (bool, int, float, str, torch.Tensor, np.ndarray)


def fields_of(common: CommonAttentionMetadata, block_size: int) -> dict[str, Any]:
    """Every field that is set, with the block table and the slot mapping cut to what is used."""
    found = {name: getattr(common, name) for name in _FIELDS}
    fields = {name: value for name, value in found.items() if isinstance(value, _CAN_TRAVEL)}
    num_columns = -(-common.max_seq_len // block_size)
    fields["block_table_tensor"] = common.block_table_tensor[:, :num_columns]
    fields["slot_mapping"] = common.slot_mapping[: common.num_actual_tokens]
    return fields


def common_from(fields: Mapping[str, Any]) -> CommonAttentionMetadata:
    """The metadata as the host's builder got it; fields of another vLLM are left out."""
    return CommonAttentionMetadata(
        **{name: value for name, value in fields.items() if name in _NAMES}
    )
