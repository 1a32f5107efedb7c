"""Times learnt online from measurements: of an engine's steps, of transfers, of a stage's layers.

All are linear in known work, and each is one ``LearntTime``, a value: a measurement gives a new
one. What differs is the work, ``StepWork`` of a step and the bytes of a transfer.

The store has predictors of its own, ``kvstore/client/cost_gate.py`` and ``TierSpeed`` of its tiers:
they begin without an estimate, and one delayed sample must not decide what is fetched next, so they
fit a window or decayed sums of samples, which a Kalman filter does not keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banaserve.orchestrator.control.model.moving import Link

_ERROR_WEIGHT = 0.1
"""Weight of one sample in the smoothed prediction error: about the last twenty samples count."""

_NOISE = 0.05
"""Relative standard deviation of a measurement, which limits the influence of one sample."""

_DRIFT = 0.01
"""Relative change of a coefficient from one sample to the next, as a standard deviation."""

_CALL_S = 4e-4
"""Initial estimate of one round trip to a guest, in seconds."""

EASED_AFTER_S = 120.0
"""Half-life of the learnt cost of a link beyond the initial estimate, in seconds."""


@dataclass(frozen=True, slots=True)
class LearntTime:
    """Time y = sum c_i x_i of work with features x_i: a Kalman filter of slowly drifting c_i.

    Attributes:
        coefficients: Coefficients c_i, in seconds for one unit of x_i.
        covariance: Covariance matrix of the coefficients, row by row.
        ceiling: Maximum standard errors, however long a kind of work is not observed.
        num_samples: Number of measurements so far.
        error_fraction: Smoothed mean of |predicted - measured| / measured, with predictions made
            before their measurement.
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    ceiling: tuple[float, ...]
    num_samples: int = 0
    error_fraction: float = 0.0

    @classmethod
    def of(cls, coefficients: Sequence[float], doubt: float = 1.0) -> LearntTime:
        """Return the time with the initial estimate ``coefficients``.

        Args:
            doubt: Relative standard error of the estimate; 1 is an error of its own size.

        Raises:
            ValueError: A coefficient is zero: give its possible size, even a small one.
        """
        if not all(coefficients):
            raise ValueError("a first coefficient of zero never moves: give its size")
        errors = tuple(doubt * abs(c) for c in coefficients)
        rows = [
            tuple(error**2 if i == j else 0.0 for j in range(len(errors)))
            for i, error in enumerate(errors)
        ]
        return cls(tuple(coefficients), tuple(rows), errors)

    def predict_s(self, features: Sequence[float]) -> float:
        """Return the predicted time in seconds, never below 0."""
        return max(0.0, _dot(self.coefficients, features))

    def observed(self, features: Sequence[float], measured_s: float) -> LearntTime:
        """Return the time after one measurement.

        Errors are relative to ``measured_s``, so that one long step does not outweigh a hundred
        short ones.

        Raises:
            ValueError: The measurement is not above 0, or the number of features differs.
        """
        if measured_s <= 0:
            raise ValueError(f"a measurement of {measured_s} is not above 0")
        if len(features) != len(self.coefficients):
            raise ValueError(f"{len(features)} features for {len(self.coefficients)} coefficients")
        before = self._drifted()
        raw_s = _dot(self.coefficients, features)
        direction = [_dot(row, features) for row in before]
        noise = (_NOISE * measured_s) ** 2 + _dot(direction, features)
        covariance = tuple(
            tuple(cell - left * right / noise for cell, right in zip(row, direction, strict=True))
            for row, left in zip(before, direction, strict=True)
        )
        coefficients = tuple(
            c + d / noise * (measured_s - raw_s)
            for c, d in zip(self.coefficients, direction, strict=True)
        )
        error = abs(max(0.0, raw_s) - measured_s) / measured_s
        weight = max(_ERROR_WEIGHT, 1 / (self.num_samples + 1))
        smoothed = self.error_fraction + weight * (error - self.error_fraction)
        return LearntTime(coefficients, covariance, self.ceiling, self.num_samples + 1, smoothed)

    def _drifted(self) -> list[list[float]]:
        """Return the covariance one sample later, its standard errors limited to the ceiling."""
        rows = [list(row) for row in self.covariance]
        scales = []
        for i, ceiling in enumerate(self.ceiling):
            rows[i][i] += (_DRIFT * self.coefficients[i]) ** 2
            scales.append(min(1.0, ceiling / rows[i][i] ** 0.5) if rows[i][i] > 0 else 1.0)
        return [
            [cell * scales[i] * scales[j] for j, cell in enumerate(row)]
            for i, row in enumerate(rows)
        ]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True)
class StepWork:
    """Work of one step of an engine, or the mean of several.

    Attributes:
        prefill_tokens: Prompt tokens that the step computes.
        prefill_pairs: Pairs of a computed prompt token and a token that it attends to, roughly the
            sum of squares of whole prompts; a chunk of c tokens after h has c (c + 2 h) pairs.
        decode_requests: Requests that get one token.
        context_tokens: Tokens of these requests so far, together.
        remote_calls: Round trips to guests: one for a range of layers, one per layer for heads.
    """

    prefill_tokens: float = 0
    prefill_pairs: float = 0
    decode_requests: float = 0
    context_tokens: float = 0
    remote_calls: float = 0

    @property
    def features(self) -> tuple[float, ...]:
        """Features of its time: 1 for the step itself, four kinds of work, and the round trips."""
        return (
            1.0,
            float(self.prefill_tokens),
            float(self.prefill_pairs),
            float(self.context_tokens),
            float(self.decode_requests),
            float(self.remote_calls),
        )


def step_time(
    fixed_s: float,
    prefill_token_s: float,
    prefill_pair_s: float,
    context_token_s: float,
    request_s: float,
    doubt: float = 1.0,
) -> LearntTime:
    """Return a step's time a + b n + c n^2 + d context + e batch, as DistServe fits, + f calls.

    Args:
        doubt: Relative standard error of these initial coefficients.
    """
    first = (fixed_s, prefill_token_s, prefill_pair_s, context_token_s, request_s, _CALL_S)
    return LearntTime.of(first, doubt)


def fill_fraction(time: LearntTime, work: StepWork, full: StepWork | None = None) -> float:
    """Return the fill of a step of ``work``, in [0, 1]: ``step_fill_fraction`` of a report.

    The fill is the share of the step's time that grows with its work; the rest is the fixed part,
    which more requests do not increase.

    Args:
        full: Largest step of its kind. It has a fixed part, too, so the fill is relative to its
            share; without ``full``, the fill stays a little below 1.
    """

    def growing(one: StepWork) -> float:
        step_s = time.predict_s(one.features)
        return min(1.0, max(0.0, 1 - time.coefficients[0] / step_s)) if step_s > 0 else 0.0

    most = 1.0 if full is None else growing(full)
    return min(1.0, growing(work) / most) if most > 0 else 0.0


def transfer_time(link: Link, doubt: float = 1.0) -> LearntTime:
    """Return the time T_sync + S / B of a transfer (BanaServe Eq. 4), with features (1, bytes).

    Args:
        link: Initial estimate; its ``sync_s`` counts as at least 1 us.
    """
    return LearntTime.of((max(link.sync_s, 1e-6), 1 / link.bytes_per_s), doubt)


def link_of(transfer: LearntTime, hop_s: float) -> Link:
    """Return the link of a ``transfer_time``; a bandwidth beyond 1 PB/s is a wrong fit."""
    sync_s, byte_s = transfer.coefficients
    return Link(1 / max(byte_s, 1e-15), max(0.0, sync_s), hop_s)


def eased(learnt: Link, first: Link, age_s: float) -> Link:
    """Return ``learnt`` with its cost beyond the initial estimate ``first`` decayed by its age.

    Nothing is learnt while nothing moves: without decay, one slow transfer could prevent all others
    forever.

    Args:
        age_s: Time since the last measurement, in seconds.
    """
    kept = 0.5 ** (max(0.0, age_s) / EASED_AFTER_S)

    def faded(value: float, guess: float) -> float:
        return value if value <= guess else guess + kept * (value - guess)

    byte_s = faded(1 / learnt.bytes_per_s, 1 / first.bytes_per_s)
    return Link(1 / byte_s, faded(learnt.sync_s, first.sync_s), learnt.hop_s)
