"""In how many parts a step runs fastest where some of its layers are elsewhere. Pure.

The makespan is that of ``orchestrator.model.overlapping``, of stages whose times are learnt from
every part that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.orchestrator.model.fit import LinearFit
from banaserve.orchestrator.model.overlapping import LEAST_PART_TOKENS, WORTH, makespan_s

HERE = ""
"""The host, among the names of guests."""

LEAST_TOKENS = LEAST_PART_TOKENS

_FIRST_S = (3e-4, 3e-5, 1e-8)
"""Of one layer, before anything is measured: in itself, for a token, for a pair of tokens."""


@dataclass(frozen=True, slots=True)
class PartWork:
    """What a step, or a part of it, computes.

    Attributes:
        tokens: That it computes.
        pairs: Of a token that it computes and a token that this one looks at.
    """

    tokens: float
    pairs: float

    @property
    def features(self) -> tuple[float, float, float]:
        return 1.0, float(self.tokens), float(self.pairs)

    def share(self, num_parts: int) -> PartWork:
        """The mean of so many parts."""
        return PartWork(self.tokens / num_parts, self.pairs / num_parts)


class StageTimes:
    """What a layer takes on the host and in each guest, learnt from every part that runs."""

    def __init__(self) -> None:
        self._fits: dict[str, LinearFit] = {}

    def predict_s(self, stage: str, num_layers: int, work: PartWork) -> float:
        """Time of a stage; a guest that has not run yet is taken to be like the host."""
        return num_layers * self._fit(stage).predict(work.features)

    def observe(self, stage: str, num_layers: int, work: PartWork, seconds: float) -> None:
        """A stage of so many layers took ``seconds``."""
        if num_layers and seconds > 0:
            sample = seconds / num_layers
            self._fits[stage] = self._fit(stage).observed(work.features, sample)

    def keep(self, stages: Sequence[str]) -> None:
        """Forget guests that are not among ``stages``."""
        self._fits = {name: fit for name, fit in self._fits.items() if name in (HERE, *stages)}

    def _fit(self, stage: str) -> LinearFit:
        first = self._fits.get(HERE)
        if first is None:
            first = LinearFit.of(_FIRST_S, doubt=3.0)
        return self._fits.get(stage, first)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How a step is to run.

    Attributes:
        num_parts: 1 where waiting is as good.
        predicted_s: Time of its layers so.
        waiting_s: Time of its layers in one part.
    """

    num_parts: int
    predicted_s: float
    waiting_s: float


def plan_parts(
    times: StageTimes, stages: Sequence[tuple[str, int]], work: PartWork, most_parts: int
) -> PartPlan:
    """The number of parts for which the pipeline is predicted to be through first.

    Args:
        stages: Host and guests, each with the number of its layers.
        work: Of the whole step.
        most_parts: That are allowed.
    """
    at_most = max(1, min(most_parts, int(work.tokens) // LEAST_TOKENS))
    spans = [_makespan_s(times, stages, work, num) for num in range(1, at_most + 1)]
    best = min(range(at_most), key=spans.__getitem__)
    if spans[best] > WORTH * spans[0]:
        best = 0
    return PartPlan(best + 1, spans[best], spans[0])


def _makespan_s(
    times: StageTimes, stages: Sequence[tuple[str, int]], work: PartWork, num_parts: int
) -> float:
    part = work.share(num_parts)
    each = [times.predict_s(name, num_layers, part) for name, num_layers in stages]
    return makespan_s(each, num_parts)


def part_sizes(num_tokens: int, num_parts: int) -> list[int]:
    """Tokens of each part: alike, in what kernels work on at a time; the last has the rest."""
    size = -(-num_tokens // (num_parts * LEAST_TOKENS)) * LEAST_TOKENS
    full, rest = divmod(num_tokens, size)
    return [size] * full + ([rest] if rest else [])
