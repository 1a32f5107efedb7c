"""Status of steps in parts, as the host of a migration reports it."""

from __future__ import annotations

import msgspec


class OverlapTimes(msgspec.Struct):
    """Sums of the times of the layers, over all steps that could be cut, in seconds.

    Attributes:
        predicted_s: Time predicted for the steps as they were cut.
        waiting_s: Time predicted for the same steps in one part.
        measured_s: Measured time.
        wrong_s: Sum of the absolute errors of the predictions.
    """

    predicted_s: float = 0.0
    waiting_s: float = 0.0
    measured_s: float = 0.0
    wrong_s: float = 0.0


class OverlapStatus(msgspec.Struct, frozen=True):
    """Status of the overlap: of a host and the guests of its layers that compute at once.

    Attributes:
        max_microbatches: Maximum number of parts of a step; 1: the host waits for guests.
        blocker: Reason why steps are not cut; empty if they may be cut.
        steps_cut: Number of steps cut so far.
        steps_waited: Number of steps in one part: not cuttable, or not predicted to be faster.
        parts: Number of parts of all steps that were planned while layers were away.
        prediction_error: Error of the predicted time of a step's layers, as a fraction, smoothed.
        times: Predicted and measured times.
    """

    max_microbatches: int
    blocker: str
    steps_cut: int
    steps_waited: int
    parts: int
    prediction_error: float
    times: OverlapTimes
