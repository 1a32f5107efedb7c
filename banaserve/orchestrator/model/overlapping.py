"""Gain of a step in parts where some of its layers run elsewhere. Pure.

A step of m parts flows through stages, a host and its guests, of which each works on one part at a
time: sum of t_i(m) + (m - 1) max of t_i(m), where t_i(m) is what stage i takes for one part. That
is the makespan of a pipeline; m = 1 is the proxy that waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from banaserve.orchestrator.model.calibration import StepTime, StepWork

LEAST_PART_TOKENS = 16
"""Of a part: what the kernels of matrix products work on at a time."""

WORTH = 0.97
"""Of the waiting step's time; what gains less is within what such predictions are wrong by."""


def makespan_s(each_s: Sequence[float], num_parts: int) -> float:
    """Time of a step whose stages take ``each_s`` for one of so many parts."""
    return sum(each_s) + (num_parts - 1) * max(each_s, default=0.0)


def overlap_fraction(model: StepTime, work: StepWork, max_microbatches: int) -> float:
    """How much of a guest's work its host would not wait for, in [0, 1].

    Of a guest with half of the layers. Every part costs the fixed part of a step once more, so
    small batches, which are bound by reading weights, gain nothing.

    Args:
        model: Of the host's steps.
        work: Of one of them.
        max_microbatches: That a step may be cut into; 1: the host waits.
    """
    tokens = work.prefill_tokens + work.decode_requests
    at_most = max(1, min(max_microbatches, int(tokens) // LEAST_PART_TOKENS))
    waiting_s = model.predict_s(work)
    best_s = min(_halves_s(model, work, num) for num in range(1, at_most + 1))
    if waiting_s <= 0 or best_s > WORTH * waiting_s:
        return 0.0
    return min(1.0, 2 * (waiting_s - best_s) / waiting_s)


def _halves_s(model: StepTime, work: StepWork, num_parts: int) -> float:
    part = StepWork(
        work.prefill_tokens / num_parts,
        work.prefill_pairs / num_parts,
        work.decode_requests / num_parts,
        work.context_tokens / num_parts,
    )
    half_s = model.predict_s(part) / 2
    return makespan_s((half_s, half_s), num_parts)
