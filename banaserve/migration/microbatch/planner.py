"""Plan micro-batches of a step whose layers run on several stages. Pure.

Micro-batches should take equal times, not have equal numbers of tokens: late tokens of a prompt
attend to more others, and while the last micro-batch is in the last stage all others are idle.
Times of stages are learnt from every micro-batch that runs. ``orchestrator.model.overlapping`` has
the makespan of micro-batches that are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from banaserve.orchestrator.control.model.learnt_time import LearntTime
from banaserve.orchestrator.control.model.overlapping import LEAST_PART_TOKENS, WORTH

Floats = NDArray[np.float64]

HERE = ""
"""Name of the host among the names of guests."""

LEAST_TOKENS = LEAST_PART_TOKENS

_FIRST_S = (3e-4, 3e-5, 1e-8)
"""Assumed times of one layer before any measurement: fixed, for a token, for a pair of tokens."""


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """Work of a step or a micro-batch.

    Attributes:
        pairs: Number of pairs of a computed token and a token that it attends to.
    """

    tokens: float
    pairs: float

    @property
    def features(self) -> tuple[float, float, float]:
        return 1.0, float(self.tokens), float(self.pairs)


class StageTimes:
    """Times of a layer on the host and in each guest, learnt from every micro-batch."""

    def __init__(self) -> None:
        self._fits: dict[str, LearntTime] = {}

    def predict_s(self, stage: str, num_layers: int, tokens: Floats, pairs: Floats) -> Floats:
        """Return the seconds of each micro-batch in a stage; a new guest counts as the host."""
        fixed_s, token_s, pair_s = self._fit(stage).coefficients
        return num_layers * np.maximum(0.0, fixed_s + token_s * tokens + pair_s * pairs)

    def observe(self, stage: str, num_layers: int, work: MicroBatchWork, seconds: float) -> None:
        """Learn that a stage of ``num_layers`` layers took ``seconds``."""
        if num_layers and seconds > 0:
            sample = seconds / num_layers
            self._fits[stage] = self._fit(stage).observed(work.features, sample)

    def keep(self, stages: Sequence[str]) -> None:
        """Forget guests that are not among ``stages``."""
        self._fits = {name: fit for name, fit in self._fits.items() if name in (HERE, *stages)}

    def _fit(self, stage: str) -> LearntTime:
        first = self._fits.get(HERE)
        if first is None:
            first = LearntTime.of(_FIRST_S, doubt=3.0)
        return self._fits.get(stage, first)


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """Micro-batches of one step, with predicted times.

    Attributes:
        sizes: Number of tokens of each micro-batch; a single micro-batch if waiting is as good.
        predicted_s: Time of the step's layers in these micro-batches, in seconds.
        waiting_s: Time of the step's layers in one micro-batch, in seconds.
    """

    sizes: tuple[int, ...]
    predicted_s: float
    waiting_s: float


def plan_microbatches(
    times: StageTimes, stages: Sequence[tuple[str, int]], seen: Floats, max_microbatches: int
) -> MicroBatchPlan:
    """Return the micro-batches with which the pipeline is predicted to end first.

    Args:
        stages: Host and guests in the order of a token's way, each with its number of layers.
        seen: Number of tokens that each token of the step attends to, including itself.
    """
    at_most = max(1, min(max_microbatches, len(seen) // LEAST_TOKENS))
    if at_most == 1:  # the case of most decode steps: there is no choice to make
        whole = np.array([len(seen)]), np.array([seen.sum()])
        waiting_s = sum(float(times.predict_s(*stage, *whole)[0]) for stage in stages)
        return MicroBatchPlan((len(seen),), waiting_s, waiting_s)
    return _best_of(times, stages, seen, _candidates(at_most))


def _best_of(
    times: StageTimes, stages: Sequence[tuple[str, int]], seen: Floats, candidates: Sequence[int]
) -> MicroBatchPlan:
    marks = _marks(len(seen))
    pairs = np.concatenate(([0.0], np.cumsum(seen)))[marks]
    cost_s = np.maximum.reduce([_rising_s(times, stage, marks, pairs) for stage in stages])
    plans = []
    for num_parts in candidates:
        cuts = _cuts(cost_s, num_parts)
        tokens, looks = np.diff(marks[cuts]), np.diff(pairs[cuts])
        each = [times.predict_s(name, layers, tokens, looks) for name, layers in stages]
        plans.append((flow_makespan_s(each), tuple(int(size) for size in tokens)))
    waiting_s, whole = plans[0]
    best_s, sizes = min(plans)
    if best_s > WORTH * waiting_s:
        best_s, sizes = waiting_s, whole
    return MicroBatchPlan(sizes, best_s, waiting_s)


def flow_makespan_s(each_s: Sequence[Floats]) -> float:
    """Return the time of a step whose micro-batches are not alike, in seconds.

    Micro-batch k leaves stage i at C_i(k) = max(C_(i-1)(k), C_i(k-1)) + t_i(k), counted from the
    beginning of the step.

    Args:
        each_s: Times of the micro-batches in each stage, in seconds, in order; at least one stage
            and one micro-batch.
    """
    done = np.cumsum(each_s[0])
    for took in each_s[1:]:
        upto = np.cumsum(took)
        done = upto + np.maximum.accumulate(done - (upto - took))
    return float(done[-1])


def _marks(num_tokens: int) -> NDArray[np.int64]:
    """Return the tokens at which a step may be cut: multiples of a kernel's tile, and both ends."""
    return np.append(np.arange(0, num_tokens, LEAST_TOKENS), num_tokens)


def _rising_s(
    times: StageTimes, stage: tuple[str, int], marks: NDArray[np.int64], pairs: Floats
) -> Floats:
    """Return the time of a stage up to each mark, without the fixed time of a micro-batch."""
    upto = times.predict_s(*stage, marks.astype(float), pairs)
    return np.asarray(np.maximum.accumulate(upto - upto[0]))


def _cuts(cost_s: Floats, num_parts: int) -> NDArray[np.int64]:
    """Return marks between which the cost is about equal; fewer if a mark would occur twice."""
    last = len(cost_s) - 1
    halfway = (cost_s[:-1] + cost_s[1:]) / 2
    nearest = np.searchsorted(halfway, cost_s[-1] * np.arange(1, num_parts) / num_parts)
    return np.unique(np.concatenate(([0], nearest, [last])))


def _candidates(at_most: int) -> list[int]:
    """Return numbers of micro-batches to try: every small number, larger ones a quarter apart."""
    found = [1]
    while (more := max(found[-1] + 1, found[-1] * 5 // 4)) <= at_most:
        found.append(more)
    return found
