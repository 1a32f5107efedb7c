"""A step's batch cut into parts, each with what attention has to know of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import ForwardContext
from vllm.v1.attention.backend import CommonAttentionMetadata

from banaserve.engine.vllm import compat_migration as compat
from banaserve.engine.vllm.migration.layer_chain import as_arguments
from banaserve.engine.vllm.migration.part_plan import PartWork
from banaserve.engine.vllm.migration.step_watch import StepWatch


@dataclass
class Part:
    """Some consecutive tokens of a step on their way through the layers.

    Attributes:
        arguments: Of the next layer, by parameter name.
        common: The batch that the part is.
        context: vLLM's for these tokens.
        num_behind: Parts of the step whose tokens come later.
        place: Segments of the model that it has entered.
        returned: What the last layer has returned for it.
        host_s: Spent on it here.
    """

    arguments: dict[str, Any]
    common: CommonAttentionMetadata
    context: ForwardContext
    num_behind: int
    place: int = 0
    returned: Any = None
    host_s: float = 0.0

    @property
    def work(self) -> PartWork:
        return work_of(self.common)

    @property
    def hidden_states(self) -> torch.Tensor:
        hidden: torch.Tensor = self.arguments["hidden_states"]
        return hidden

    def take(self, returned: Any) -> None:
        """A layer has returned this: the next one takes it."""
        self.returned = returned
        self.arguments |= as_arguments(returned)


def work_of(common: CommonAttentionMetadata) -> PartWork:
    """Tokens of a batch, and at how many tokens they look together."""
    seen = seen_of(common)
    return PartWork(float(len(seen)), float(seen.sum()))


def seen_of(common: CommonAttentionMetadata) -> NDArray[np.float64]:
    """At how many tokens each token of a batch looks, itself among them."""
    starts = common.query_start_loc_cpu.numpy()
    queries = np.diff(starts)
    lengths = common.seq_lens.cpu().numpy()[: len(queries)]
    before = np.repeat(lengths - starts[1:], queries)
    return np.asarray(before + np.arange(1, len(before) + 1), dtype=np.float64)


def why_uncut(
    arguments: Mapping[str, Any], common: CommonAttentionMetadata, context: ForwardContext
) -> str:
    """Why a step cannot be cut between its tokens; empty where it can."""
    num_tokens = common.num_actual_tokens
    if common.causal is not True:
        return "its tokens look at later ones"
    if not isinstance(context.attn_metadata, dict) or not isinstance(context.slot_mapping, dict):
        return "the engine has cut it already"
    if int(common.query_start_loc_cpu[-1]) != num_tokens:
        return "it is padded"
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.shape[:1] != (num_tokens,):
            return f"{name} has not one row for each token"
    return ""


def cut(
    arguments: Mapping[str, Any], watch: StepWatch, context: ForwardContext, sizes: Sequence[int]
) -> list[Part]:
    """The parts of the step under way, in the order of their tokens.

    Args:
        sizes: Tokens of each; together those of the step.
    """
    assert watch.common is not None
    if len(sizes) == 1:
        return [Part(dict(arguments), watch.common, context, 0)]
    parts = []
    begin = 0
    for number, common in enumerate(compat.split_batch(watch.common, sizes), start=1):
        end = begin + common.num_actual_tokens
        mine = {k: v[begin:end] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        own = _context(context, common, watch.metadata_of(common), slice(begin, end))
        parts.append(Part(mine, common, own, len(sizes) - number))
        begin = end
    return parts


def _context(
    whole: ForwardContext, common: CommonAttentionMetadata, metadata: Any, tokens: slice
) -> ForwardContext:
    assert isinstance(whole.attn_metadata, dict)
    assert isinstance(whole.slot_mapping, dict)
    return dataclasses.replace(
        whole,
        attn_metadata=dict.fromkeys(whole.attn_metadata, metadata),
        slot_mapping=dict.fromkeys(whole.slot_mapping, common.slot_mapping),
        is_padding=None if whole.is_padding is None else whole.is_padding[tokens],
    )


def join(parts: Sequence[Part]) -> Any:
    """What the last layer has returned for all parts, as for one step."""
    if len(parts) == 1:
        return parts[0].returned
    if not isinstance(parts[0].returned, tuple):
        return torch.cat([part.returned for part in parts])
    columns = zip(*(part.returned for part in parts), strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)
