"""Gain of cutting a step into parts while some of its layers run elsewhere. Pure.

A step of m parts flows through stages, a host and its guests, each of which works on one part at a
time. It takes the makespan of a pipeline, sum of t_i(m) + (m - 1) max of t_i(m), where t_i(m) is
the time of stage i for one part; with m = 1 the host waits for its guests.
"""

from __future__ import annotations

from collections.abc import Sequence

from banaserve.orchestrator.control.model.learnt_time import LearntTime, StepWork

LEAST_PART_TOKENS = 16
"""Minimum number of tokens of a part: the tile size of matrix product kernels."""

WORTH = 0.97
"""Maximum time of a step in parts, as a share of the time of the waiting step, at which the parts
are worthwhile: a smaller gain is within the error of such predictions."""


def makespan_s(each_s: Sequence[float], num_parts: int) -> float:
    """Return the time of a step of ``num_parts`` parts; its stages take ``each_s`` for one part."""
    return sum(each_s) + (num_parts - 1) * max(each_s, default=0.0)


def overlap_fraction(model: LearntTime, work: StepWork, max_microbatches: int) -> float:
    """Return the share of a guest's work that its host would not wait for, in [0, 1].

    The guest is taken to have half of the layers. Every part repeats the fixed time of a step, so
    small batches, which are bound by reading weights, gain nothing.

    Args:
        model: Model of the host's step times.
        work: Work of one of its steps.
        max_microbatches: Maximum number of parts of a step; 1: the host waits.
    """
    tokens = work.prefill_tokens + work.decode_requests
    at_most = max(1, min(max_microbatches, int(tokens) // LEAST_PART_TOKENS))
    waiting_s = model.predict_s(work.features)
    best_s = min(_halves_s(model, work, num) for num in range(1, at_most + 1))
    if waiting_s <= 0 or best_s > WORTH * waiting_s:
        return 0.0
    return min(1.0, 2 * (waiting_s - best_s) / waiting_s)


def _halves_s(model: LearntTime, work: StepWork, num_parts: int) -> float:
    part = StepWork(
        work.prefill_tokens / num_parts,
        work.prefill_pairs / num_parts,
        work.decode_requests / num_parts,
        work.context_tokens / num_parts,
    )
    half_s = model.predict_s(part.features) / 2
    return makespan_s((half_s, half_s), num_parts)
