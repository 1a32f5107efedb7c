"""Status of steps in parts, as the host of a migration tells it."""

from __future__ import annotations

import msgspec


class OverlapTimes(msgspec.Struct):
    """Sums over all steps that could be cut, of the time of their layers.

    Attributes:
        predicted_s: As the steps were cut.
        waiting_s: Predicted for the same steps in one part.
        measured_s: As it was.
        wrong_s: By how much each prediction was off, whatever the sign.
    """

    predicted_s: float = 0.0
    waiting_s: float = 0.0
    measured_s: float = 0.0
    wrong_s: float = 0.0


class OverlapStatus(msgspec.Struct, frozen=True):
    """Whether a host and the guests of its layers compute at once.

    Attributes:
        max_microbatches: That a step may be cut into; 1: guests are waited for.
        blocker: Why steps are not cut; empty where they may be.
        steps_cut: So far.
        steps_waited: Run in one part, because no other number was predicted to be faster.
        parts: Of all steps while layers were away.
        prediction_error: Of the time of a step's layers, as a fraction, smoothed.
        times: Predicted and measured.
    """

    max_microbatches: int
    blocker: str
    steps_cut: int
    steps_waited: int
    parts: int
    prediction_error: float
    times: OverlapTimes
