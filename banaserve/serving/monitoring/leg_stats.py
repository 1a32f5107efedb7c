"""Statistics of one step's outputs, separate for each kind of leg.

vLLM counts the output of each engine. A request with a prefill leg and a decode leg would count
twice: as two requests, with two prompts and one token too many.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from banaserve.engine.compat.engine import (
    EngineCoreOutput,
    FinishReason,
    IterationStats,
    RequestStateStats,
)


class Leg(StrEnum):
    """Kind of a leg, which labels vLLM's request metrics.

    Attributes:
        PREFILL: Leg that computes the prompt, which is counted here.
        DECODE: Leg that follows a prefill leg; the request and its output are counted here.
        WHOLE: Leg that computes prompt and output.
        UNCOUNTED: Leg that computes a prompt that has been counted already.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"
    UNCOUNTED = "uncounted"


class Sequences:
    """Sequences of one request, its ``n``, which the metrics of its parameters count once."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences
        self.most_tokens = 0
        self._num_open = num_sequences

    def has_ended(self, num_tokens: int) -> bool:
        """Note the end of a sequence after ``num_tokens``; return True if it was the last one."""
        self._num_open -= 1
        self.most_tokens = max(self.most_tokens, num_tokens)
        return self._num_open == 0


@dataclass
class LegRequestStats(RequestStateStats):
    """vLLM's statistics of a request, and the leg that they belong to."""

    leg: Leg = Leg.WHOLE
    sequences: Sequences | None = None


class IterationByLeg(IterationStats):
    """vLLM's statistics of the outputs of one step.

    Attributes:
        by_leg: Counts of each kind of leg, as vLLM would count without the other kinds.
        num_outputs: Number of requests' outputs that were counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_leg: dict[Leg, IterationStats] = {}
        self.num_outputs = 0

    def update_from_output(
        self,
        output: EngineCoreOutput,
        engine_core_timestamp: float,
        is_prefilling: bool,
        req_stats: RequestStateStats,
        *names: Any,
    ) -> None:
        """Count an output of a request for its leg."""
        queued_s, was_scheduled = req_stats.queued_ts, req_stats.scheduled_ts > 0.0
        counts = self._of(_leg(req_stats))
        self.num_outputs += 1
        counts.update_from_output(output, engine_core_timestamp, is_prefilling, req_stats, *names)
        if was_scheduled:  # A stream that continues elsewhere waited where it began.
            req_stats.queued_ts = queued_s

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        req_stats: RequestStateStats,
        num_cached_tokens: int = 0,
    ) -> None:
        """Count the end of a request's leg."""
        leg = _leg(req_stats)
        if leg in (Leg.PREFILL, Leg.UNCOUNTED) and finish_reason not in _COMPLETE:
            # An error ends the request with its leg; anything else is tried again.
            leg = Leg.WHOLE if finish_reason is FinishReason.ERROR else Leg.UNCOUNTED
        counts = self._of(leg)
        counts.update_from_finished_request(
            finish_reason=finish_reason,
            request_id=request_id,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens_param=max_tokens_param,
            req_stats=req_stats,
            num_cached_tokens=num_cached_tokens,
        )
        never_below_zero(counts.finished_requests[-1])
        sequences = getattr(req_stats, "sequences", None) or Sequences()
        if leg in (Leg.DECODE, Leg.WHOLE) and sequences.has_ended(req_stats.num_generation_tokens):
            counts.n_params_iter.append(sequences.num_sequences)
            counts.max_num_generation_tokens_iter.append(sequences.most_tokens)

    @property
    def num_step_tokens(self) -> int:
        """Number of tokens that the engine computed in this step, over all legs."""
        counts = self.by_leg.values()
        return sum(one.num_generation_tokens + one.prompt_token_stats.computed for one in counts)

    def _of(self, leg: Leg) -> IterationStats:
        if (found := self.by_leg.get(leg)) is None:
            found = self.by_leg[leg] = IterationStats()
        return found


def add(total: IterationStats, counts: IterationStats) -> None:
    """Add ``counts`` to ``total``: sums of numbers, and the samples of both."""
    prompt, more = vars(total.prompt_token_stats), counts.prompt_token_stats
    if more.total:
        prompt.update((name, prompt[name] + amount) for name, amount in vars(more).items())
    sums = vars(total)
    for name, amount in vars(counts).items():
        if amount and name not in ("iteration_timestamp", "prompt_token_stats"):
            sums[name] += amount


_COMPLETE = frozenset({FinishReason.STOP, FinishReason.LENGTH})


def _leg(stats: RequestStateStats) -> Leg:
    """Return the kind of leg; sessions and embedding requests have vLLM's statistics: whole."""
    return stats.leg if isinstance(stats, LegRequestStats) else Leg.WHOLE


def never_below_zero(finished: Any) -> None:
    """Raise negative times of a finished request to 0.

    vLLM counts from the engine's own scheduling. A first token from prefill, or from the previous
    engine of a stream, precedes the scheduling in the engine that ends the request.
    """
    for name in ("queued_time", "prefill_time", "decode_time", "inference_time"):
        setattr(finished, name, max(0.0, getattr(finished, name)))
