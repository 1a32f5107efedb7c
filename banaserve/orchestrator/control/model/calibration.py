"""Calibration of step times and transfer times from measurements."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.orchestrator.control.model.fit import LinearFit
from banaserve.orchestrator.control.model.moving import Link


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
        """Features of the fit: 1 for the step itself, four kinds of work, and the round trips."""
        return (
            1.0,
            float(self.prefill_tokens),
            float(self.prefill_pairs),
            float(self.context_tokens),
            float(self.decode_requests),
            float(self.remote_calls),
        )


@dataclass(frozen=True, slots=True)
class StepTime:
    """Time of a step: a + b n + c n^2 + d context + e batch, as in DistServe's fits, + f calls.

    Immutable: each measurement returns a new object.
    """

    fit: LinearFit

    @classmethod
    def of(
        cls,
        fixed_s: float,
        prefill_token_s: float,
        prefill_pair_s: float,
        context_token_s: float,
        request_s: float,
        doubt: float = 1.0,
        call_s: float = 4e-4,
    ) -> StepTime:
        """Return the model with these initial coefficients, for example those of a profile.

        Args:
            doubt: Relative standard error of the coefficients.
            call_s: Time of one round trip to a guest, in seconds.
        """
        first = (fixed_s, prefill_token_s, prefill_pair_s, context_token_s, request_s, call_s)
        return cls(LinearFit.of(first, doubt))

    def predict_s(self, work: StepWork) -> float:
        return self.fit.predict(work.features)

    def fill_fraction(self, work: StepWork, full: StepWork | None = None) -> float:
        """Return the fill of a step of ``work``, in [0, 1]: ``step_fill_fraction`` of a report.

        The fill is the share of the step's time that grows with its work; the rest is the fixed
        part, which more requests do not increase.

        Args:
            full: Largest step of its kind. It has a fixed part, too, so the fill is relative to its
                share; without ``full``, the fill stays a little below 1.
        """
        share = self._work_share(work)
        most = 1.0 if full is None else self._work_share(full)
        return min(1.0, share / most) if most > 0 else 0.0

    def _work_share(self, work: StepWork) -> float:
        step_s = self.predict_s(work)
        if step_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.fit.coefficients[0] / step_s))

    @property
    def call_s(self) -> float:
        """Time that one round trip to a guest adds to a step; never negative."""
        return max(0.0, self.fit.coefficients[5])

    def observed(self, work: StepWork, measured_s: float) -> StepTime:
        """Return the model after a step of ``work`` took ``measured_s``."""
        return StepTime(self.fit.observed(work.features, measured_s))

    @property
    def error_fraction(self) -> float:
        """Smoothed relative error of predictions made before their measurement."""
        return self.fit.error_fraction


EASED_AFTER_S = 120.0
"""Half-life of the learnt cost of a link beyond the initial estimate, in seconds."""


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


@dataclass(frozen=True, slots=True)
class TransferTime:
    """Time of a transfer: T_sync + S / B (BanaServe Eq. 4), learnt from transfers.

    Immutable: each measurement returns a new object.
    """

    fit: LinearFit

    @classmethod
    def of(cls, link: Link, doubt: float = 1.0) -> TransferTime:
        """Return the model with ``link`` as its initial estimate, its ``sync_s`` at least 1 us."""
        return cls(LinearFit.of((max(link.sync_s, 1e-6), 1 / link.bytes_per_s), doubt))

    def predict_s(self, num_bytes: float) -> float:
        return self.fit.predict((1.0, num_bytes))

    def observed(self, num_bytes: float, measured_s: float) -> TransferTime:
        """Return the model after ``num_bytes`` took ``measured_s``."""
        return TransferTime(self.fit.observed((1.0, num_bytes), measured_s))

    def link(self, hop_s: float) -> Link:
        """Return the measured link; a bandwidth beyond 1 PB/s is a wrong fit and is limited."""
        sync_s, byte_s = self.fit.coefficients
        return Link(1 / max(byte_s, 1e-15), max(0.0, sync_s), hop_s)

    @property
    def error_fraction(self) -> float:
        """Smoothed relative error of predictions made before their measurement."""
        return self.fit.error_fraction
