"""Parts of a step on their way through layers here and in guests, which compute at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from torch import nn
from vllm.forward_context import override_forward_context

from banaserve.engine.vllm.migration import store_hooks
from banaserve.engine.vllm.migration.layer_chain import LayerChain
from banaserve.engine.vllm.migration.layer_proxy import RangeProxy, RemoteRange
from banaserve.engine.vllm.migration.part_plan import HERE, StageTimes
from banaserve.engine.vllm.migration.step_parts import Part
from banaserve.engine.vllm.migration.step_watch import StepWatch
from banaserve.errors import GuestLostError

Segment = LayerChain | RemoteRange


def segments_of(modules: Sequence[nn.Module]) -> list[Segment]:
    """The model's list of layers as runs of layers here and ranges elsewhere, in order."""
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


class Pipeline:
    """One step. All parts begin first, so that guests have work; then they go on in their order.

    No part overtakes another, here or in a guest, so each finds the KV of those before it: what
    chunks of a prompt in steps of their own find.

    Args:
        segments: Of the model.
        times: Learn what each part takes.
    """

    def __init__(self, segments: Sequence[Segment], watch: StepWatch, times: StageTimes) -> None:
        self._segments = segments
        self._watch = watch
        self._times = times
        self._waiting: deque[tuple[Part, RemoteRange]] = deque()

    def run(self, parts: Sequence[Part]) -> bool:
        """Take all parts through all layers; False where a guest was lost on the way."""
        try:
            for part in parts:
                self._advance(part)
                while self._can_feed_another():
                    self._advance(self._collect())
            while self._waiting:
                self._advance(self._collect())
        except GuestLostError as error:
            self._end(error, max(part.common.num_actual_tokens for part in parts))
            return False
        except BaseException:
            # The engine ends with this, and what guests write to the store ends before it.
            for _, span in self._waiting:
                span.where.link.give_up("the step has failed here")
            raise
        finally:
            store_hooks.hold_saves(False)
        here = sum(len(s) for s in self._segments if isinstance(s, LayerChain))
        for part in parts:
            self._times.observe(HERE, here, part.work, part.host_s)
        return True

    def _advance(self, part: Part) -> None:
        """Compute a part until a guest has it, or until it is through."""
        began_s = time.perf_counter()
        with self._watch.part(part.common):
            while part.place < len(self._segments):
                segment = self._segments[part.place]
                part.place += 1
                if isinstance(segment, RemoteRange):
                    self._post(part, segment)
                    break
                self._compute(part, segment)
        part.host_s += time.perf_counter() - began_s

    def _compute(self, part: Part, layers: LayerChain) -> None:
        store_hooks.hold_saves(part.num_behind > 0)
        with override_forward_context(part.context):
            part.take(layers.run(part.arguments))

    def _post(self, part: Part, span: RemoteRange) -> None:
        span.wait_for_loads()
        saves = None if part.num_behind else span.slots_to_fill()
        span.where.post(part.arguments, part.num_behind, saves)
        self._waiting.append((part, span))

    def _can_feed_another(self) -> bool:
        """Whether a part is back that another guest might be waiting for."""
        if not self._waiting:
            return False
        part, span = self._waiting[0]
        ahead = self._segments[part.place :]
        return any(isinstance(s, RemoteRange) for s in ahead) and span.where.link.has_answer()

    def _collect(self) -> Part:
        """Wait for the part that was posted first."""
        part, span = self._waiting.popleft()
        values = span.where.collect(part.hidden_states)
        part.take(span.returned(values))
        link = span.where.link
        self._times.observe(link.guest_id, len(span), part.work, link.run_s)
        if part.num_behind == 0:
            store_hooks.hold_saves(False)
            span.save(part.context.attn_metadata)
        return part

    def _end(self, error: GuestLostError, most_tokens: int) -> None:
        """Leave nothing on the way: the next that is asked must get its own answer."""
        spans = {s.where.link: s for s in self._segments if isinstance(s, RemoteRange)}
        for link in spans:
            link.drop(most_tokens)
        for link, span in spans.items():
            if link.lost is not None:
                span.lost(error)
