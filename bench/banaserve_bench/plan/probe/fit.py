"""Linear step times, fitted to measured steps, and their errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np

from banaserve.orchestrator.control.costs.profile import DecodeSection, PrefillSection
from banaserve_bench.results.statistics import median
from banaserve_bench.silicon.linear import least_squares

_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A kind of step and its measured times, one for each run.

    Attributes:
        tokens: Number of prompt tokens that are computed.
        batch: Number of requests that decode.
        context: Mean number of tokens of these requests.
        seconds: Measured times of all steps together.
        num_steps: Number of steps that compute the prompt tokens.
    """

    tokens: int
    batch: int
    context: float
    seconds: tuple[float, ...]
    num_steps: int = 1

    @property
    def took_s(self) -> float:
        """Median of the measured times, in seconds."""
        return median(self.seconds)


class StepFit(NamedTuple):
    """Coefficients of step times."""

    prefill: PrefillSection
    decode: DecodeSection

    @classmethod
    def of(cls, prompts: Sequence[MeasuredStep], batches: Sequence[MeasuredStep]) -> Self:
        """Return the coefficients of least relative error.

        Args:
            prompts: Steps that only compute prompts.
            batches: Steps that only decode.
        """
        prefill = fitted(
            [(s.num_steps, s.tokens, s.tokens**2) for s in prompts], [s.took_s for s in prompts]
        )
        decode = fitted(
            [(1, s.batch * s.context, s.batch) for s in batches], [s.took_s for s in batches]
        )
        fixed_s, context_token_s, request_s = decode
        return cls(PrefillSection(*prefill), DecodeSection(fixed_s, context_token_s, request_s))

    def predicted_s(self, step: MeasuredStep) -> float:
        """Return the time of a step; one of prompts and decoding has the larger fixed part."""
        prefill, decode = self.prefill, self.decode
        work_s = step.tokens * prefill.token_s + step.tokens**2 * prefill.pair_s
        work_s += step.batch * (step.context * decode.context_token_s + decode.request_s)
        fixed_s = max(
            step.num_steps * prefill.fixed_s if step.tokens else 0.0,
            decode.fixed_s if step.batch else 0.0,
        )
        return fixed_s + work_s

    def errors_of(self, steps: Sequence[MeasuredStep]) -> list[float]:
        """Return the relative error of each step, without sign."""
        return [abs(self.predicted_s(step) - step.took_s) / step.took_s for step in steps]


def fitted(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return positive coefficients of the least relative error; negative ones are left out."""
    wanted = np.asarray(seconds)
    rows = np.asarray(features, dtype=float) / wanted[:, None]
    return [max(_LEAST, one) for one in least_squares([*rows.T], np.ones(len(wanted)))]
