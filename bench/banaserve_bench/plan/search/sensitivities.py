"""Sensitivities: answers to questions that differ a little from the one that was asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.plan.search.gain import Answer, GoodputRuns, answer, gain_of_one_load
from banaserve_bench.plan.search.loads import Rows, cut_share, faster, longer
from banaserve_bench.plan.search.question import PlanQuestion
from banaserve_bench.plan.search.trial import StepError
from banaserve_bench.results.statistics import Interval

_REQUESTS = 1000
_LESS, _MORE = 0.8, 1.25


class Sensitivity(NamedTuple):
    """Answer to a question that differs in one thing; of one load, whose spread is not counted.

    Attributes:
        change: Difference, in words.
        gain: Gain of the same challenger over the same rival, with the error of step times.
    """

    change: str
    answer: Answer
    gain: Interval


def find_sensitivities(
    asked: PlanQuestion, challenger: Candidate, rival: Candidate, tell: Callable[[str], None]
) -> list[Sensitivity]:
    """Return the answers to the questions near ``asked``."""
    found = []
    for change, other, rows in _nearby(asked):
        tell(f"sensitivity: {change}")
        own, theirs = (_runs(other, one, rows) for one in (challenger, rival))
        gain = gain_of_one_load(own, theirs, len(rows))
        found.append(Sensitivity(change, answer(gain, other.error is not None), gain.whole))
    return found


def _nearby(asked: PlanQuestion) -> Iterator[tuple[str, PlanQuestion, Rows]]:
    rows = asked.loads.first[:_REQUESTS]
    most = asked.device.profile.model.max_context_tokens
    for scale in (_LESS, _MORE):
        words = f"{abs(scale - 1):.0%} {'higher' if scale > 1 else 'lower'}"
        yield f"rate {words}", asked, faster(rows, scale)
    for scale in (_LESS, _MORE):
        scaled = longer(rows, scale, most)
        if not asked.has_prefixes and cut_share(scaled, most) <= cut_share(rows, most):
            words = f"{abs(scale - 1):.0%} {'longer' if scale > 1 else 'shorter'}"
            yield f"prompts {words}", asked, scaled
    for scale in (_LESS, _MORE):
        limits = LatencyLimits(asked.limits.ttft_s, scale * asked.limits.tpot_s)
        told = f"TPOT limit {1e3 * limits.tpot_s:.3g} ms"
        yield told, replace(asked, limits=limits), rows
    if asked.error is not None and asked.error.step:
        for scale in (0.5, 2.0):
            error = StepError(scale * asked.error.step, scale * asked.error.ttft)
            told = f"error of step times {error.step:.1%}"
            yield told, replace(asked, error=error), rows


def _runs(asked: PlanQuestion, candidate: Candidate, rows: Rows) -> GoodputRuns:
    shares = [asked.run(candidate, rows, one)["goodput_fraction"] for one in asked.scenarios]
    return GoodputRuns(*([float(share)] for share in shares))
