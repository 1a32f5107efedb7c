"""What parts of a step gain, by hand."""

from __future__ import annotations

import pytest

from banaserve.orchestrator.control.model.learnt_time import StepWork, step_time
from banaserve.orchestrator.control.model.overlapping import makespan_s, overlap_fraction

FREE = step_time(1e-12, 1e-3, 1e-15, 1e-15, 1e-3)
"""Nothing but work: a millisecond a token."""
BOUND = step_time(10e-3, 1e-3, 1e-15, 1e-15, 1e-4)
"""Reading weights takes ten milliseconds; a decoding request a tenth of one more."""


def test_the_makespan_of_a_pipeline() -> None:
    assert makespan_s((2.0, 3.0), 1) == 5.0
    assert makespan_s((2.0, 3.0), 4) == 14.0
    assert makespan_s((), 4) == 0.0


@pytest.mark.parametrize(("parts", "fraction"), [(1, 0.0), (2, 0.5), (4, 0.75), (8, 0.875)])
def test_parts_of_a_prompt_keep_both_at_work(parts: int, fraction: float) -> None:
    """m parts of two halves take (m + 1) / 2m of the time, of which half was the guest's."""
    found = overlap_fraction(FREE, StepWork(prefill_tokens=2048), parts)
    assert found == pytest.approx(fraction, abs=1e-6)


def test_more_parts_than_pay_are_not_made() -> None:
    """Of 64 tokens four parts at most, of which each costs reading the weights once more."""
    work = StepWork(prefill_tokens=64)
    best_s = min((10e-3 + 64e-3 / m) * (m + 1) / 2 for m in (1, 2, 3, 4))
    whole_s = 74e-3
    assert overlap_fraction(BOUND, work, 64) == pytest.approx(2 * (1 - best_s / whole_s))


@pytest.mark.parametrize("batch", [1, 8, 31, 32, 64])
def test_batches_that_decode_are_bound_by_reading_weights(batch: int) -> None:
    assert overlap_fraction(BOUND, StepWork(decode_requests=batch), 64) == 0.0


def test_a_large_batch_of_dear_requests_alternates() -> None:
    dear = step_time(10e-3, 1e-3, 1e-15, 1e-15, 2e-3)
    assert overlap_fraction(dear, StepWork(decode_requests=64), 64) > 0.3
    assert overlap_fraction(dear, StepWork(decode_requests=16), 64) == 0.0, "one part of 16"


def test_an_idle_host_gains_nothing() -> None:
    nothing = step_time(1e-12, 1e-3, 1e-15, 1e-15, 1e-3)
    assert overlap_fraction(nothing, StepWork(), 8) == 0.0
