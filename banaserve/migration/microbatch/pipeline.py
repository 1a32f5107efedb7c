"""Pipeline of micro-batches: a step's batch is cut, and host and guests compute at once."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.runner.attention import (
    CommonAttentionMetadata,
    ForwardContext,
    override_forward_context,
    split_batch,
)
from banaserve.migration.kv import store_copier
from banaserve.migration.kv.step_context import StepContext, lengths_of
from banaserve.migration.microbatch.planner import HERE, MicroBatchWork, StageTimes
from banaserve.migration.modules.layer_proxy import (
    LayerChain,
    RangeProxy,
    RemoteLayers,
    as_arguments,
)

Segment = LayerChain | RemoteLayers


class Pipeline:
    """Run of one step. All micro-batches begin first, to give guests work, then go on in order.

    No micro-batch overtakes another, here or in a guest, so each finds the KV of those before it,
    as chunks of a prompt in separate steps do.

    Args:
        times: Times of the stages, which learn from each micro-batch.
    """

    def __init__(
        self, segments: Sequence[Segment], step_context: StepContext, times: StageTimes
    ) -> None:
        self._segments = segments
        self._step_context = step_context
        self._times = times
        self._waiting: deque[tuple[MicroBatch, RemoteLayers]] = deque()

    def run(self, batches: Sequence[MicroBatch]) -> bool:
        """Take all micro-batches through all layers; return False if a guest was lost meanwhile."""
        try:
            for batch in batches:
                self._advance(batch)
                while self._can_feed_another():
                    self._advance(self._collect())
            while self._waiting:
                self._advance(self._collect())
        except GuestLostError as error:
            self._end(error, max(batch.common.num_actual_tokens for batch in batches))
            return False
        except BaseException:
            # The engine ends with this error; writes of guests to the store have to end before.
            for _, span in self._waiting:
                span.link.give_up("the step has failed here")
            raise
        finally:
            store_copier.hold_saves(False)
        here = sum(len(s) for s in self._segments if isinstance(s, LayerChain))
        for batch in batches:
            self._times.observe(HERE, here, batch.work, batch.host_s)
        return True

    def _advance(self, batch: MicroBatch) -> None:
        """Compute a micro-batch until it is submitted to a guest or has passed all layers."""
        began_s = time.perf_counter()
        with self._step_context.part(batch.common):
            while batch.place < len(self._segments):
                segment = self._segments[batch.place]
                batch.place += 1
                if isinstance(segment, RemoteLayers):
                    self._submit(batch, segment)
                    break
                self._compute(batch, segment)
        batch.host_s += time.perf_counter() - began_s

    def _compute(self, batch: MicroBatch, layers: LayerChain) -> None:
        store_copier.hold_saves(batch.num_behind > 0)
        with override_forward_context(batch.context):
            batch.take(layers.run(batch.arguments))

    def _submit(self, batch: MicroBatch, span: RemoteLayers) -> None:
        span.wait_for_loads()
        saves = None if batch.num_behind else span.slots_to_fill()
        span.submit(batch.arguments, batch.num_behind, saves)
        self._waiting.append((batch, span))

    def _can_feed_another(self) -> bool:
        """Return whether a micro-batch has come back that another guest might be waiting for."""
        if not self._waiting:
            return False
        batch, span = self._waiting[0]
        ahead = self._segments[batch.place :]
        return any(isinstance(s, RemoteLayers) for s in ahead) and span.link.has_answer()

    def _collect(self) -> MicroBatch:
        """Wait for the micro-batch that was submitted first, and return it."""
        batch, span = self._waiting.popleft()
        batch.take(span.collect(batch.hidden_states))
        self._times.observe(span.link.guest_id, len(span), batch.work, span.link.run_s)
        if batch.num_behind == 0:
            store_copier.hold_saves(False)
            span.save(batch.context.attn_metadata)
        return batch

    def _end(self, error: GuestLostError, most_tokens: int) -> None:
        """Drop all pending answers, so that the next request to a guest gets its own answer."""
        spans = {s.link: s for s in self._segments if isinstance(s, RemoteLayers)}
        for link in spans:
            link.drop(most_tokens)
        for link, span in spans.items():
            if link.lost is not None:
                span.lost(error)


def segments_of(modules: Sequence[nn.Module]) -> list[Segment]:
    """Return the model's list of layers as runs of layers here and ranges in guests, in order."""
    found: list[Segment] = []
    index = 0
    while index < len(modules):
        first = modules[index]
        if isinstance(first, RangeProxy):
            found.append(first.span)
            index += len(first.span)
            continue
        end = index
        while end < len(modules) and not isinstance(modules[end], RangeProxy):
            end += 1
        found.append(LayerChain(modules[index:end]))
        index = end
    return found


@dataclass
class MicroBatch:
    """Consecutive tokens of a step on their way through the layers.

    Attributes:
        context: vLLM's forward context for these tokens.
        num_behind: Number of micro-batches of the step with later tokens.
        place: Number of the model's segments that the micro-batch has entered.
        returned: Values of the layer that the micro-batch has passed last.
    """

    arguments: dict[str, Any]
    common: CommonAttentionMetadata
    context: ForwardContext
    num_behind: int
    place: int = 0
    returned: Any = None
    host_s: float = 0.0

    @property
    def work(self) -> MicroBatchWork:
        return work_of(self.common)

    @property
    def hidden_states(self) -> torch.Tensor:
        hidden: torch.Tensor = self.arguments["hidden_states"]
        return hidden

    def take(self, returned: Any) -> None:
        """Take the values that a layer has returned as arguments of the next layer."""
        self.returned = returned
        self.arguments |= as_arguments(returned)


def work_of(common: CommonAttentionMetadata) -> MicroBatchWork:
    """Return the number of tokens of a batch, and the number of tokens that they attend to."""
    seen = seen_of(common)
    return MicroBatchWork(float(len(seen)), float(seen.sum()))


def seen_of(common: CommonAttentionMetadata) -> NDArray[np.float64]:
    """Return the number of tokens that each token of a batch attends to, including itself."""
    starts, lengths = lengths_of(common)
    queries = np.diff(starts)
    before = np.repeat(lengths - starts[1:], queries)
    return np.asarray(before + np.arange(1, len(before) + 1), dtype=np.float64)


def microbatch_blocker(
    arguments: Mapping[str, Any], common: CommonAttentionMetadata, context: ForwardContext
) -> str:
    """Return the reason why a step cannot be cut between its tokens; empty if it can."""
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
    arguments: Mapping[str, Any],
    step_context: StepContext,
    context: ForwardContext,
    sizes: Sequence[int],
) -> list[MicroBatch]:
    """Return the micro-batches of the step under way, in the order of their tokens.

    Args:
        sizes: Number of tokens of each micro-batch; the sum is the number of tokens of the step.
    """
    assert step_context.common is not None
    if len(sizes) == 1:
        return [MicroBatch(dict(arguments), step_context.common, context, 0)]
    batches = []
    begin = 0
    for number, common in enumerate(split_batch(step_context.common, sizes), start=1):
        end = begin + common.num_actual_tokens
        mine = {k: v[begin:end] if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        own = _context(context, common, step_context.metadata_of(common), slice(begin, end))
        batches.append(MicroBatch(mine, common, own, len(sizes) - number))
        begin = end
    return batches


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


def join(batches: Sequence[MicroBatch]) -> Any:
    """Return the output of the last layer for all micro-batches, joined as that of one step."""
    if len(batches) == 1:
        return batches[0].returned
    if not isinstance(batches[0].returned, tuple):
        return torch.cat([batch.returned for batch in batches])
    columns = zip(*(batch.returned for batch in batches), strict=True)
    return tuple(None if column[0] is None else torch.cat(column) for column in columns)
