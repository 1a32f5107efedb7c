"""GORGO's (1+1) evolution strategy exactly as in its code, with its faults, for comparison."""

from __future__ import annotations

from collections import deque
from math import exp, log

from banaserve.base.errors import UserError
from banaserve_route.policies.gorgo.tuner import numbers, p95
from banaserve_route.policies.interface import Generator, State

WINDOW, HOP = 128, 32
SIGMA, SIGMA_FLOOR, SIGMA_FACTOR = 0.5, 0.05, 0.817
SUCCESS_WINDOW, SUCCESS_TARGET, TOLERANCE = 8, 0.2, 0.005
RANGES = ((0.05, 2.0), (0.05, 0.5))
START = (0.5, 0.1)


class CodedTuner:
    """Tuner by the negative p95 of the time to first token over 128 completions, every 32.

    Scores are negative, so that ``score > best x 1.005`` accepts up to 0.5 % worse scores, and each
    time lowers the requirement; the windows of successive candidates overlap; the best is never
    measured again; the search ends finally when the step size has shrunk.
    """

    phase = 0

    def __init__(self, generator: Generator) -> None:
        self.weights: tuple[float, ...] = START
        self.sigma = SIGMA
        self.best: tuple[float, ...] = START
        self.best_score: float | None = None
        self.num_evaluations = 0
        self.is_over = False
        self._generator = generator
        self._ttft_ms: deque[float] = deque(maxlen=WINDOW)
        self._since = 0
        self._outcomes: deque[bool] = deque(maxlen=SUCCESS_WINDOW)

    def sample(self, phase: int, ttft_ms: float, e2e_ms: float) -> None:
        """Add a finished request, whatever weights it was sent under."""
        self._ttft_ms.append(ttft_ms)
        self._since += 1
        if self.is_over or len(self._ttft_ms) < WINDOW:
            return
        if self.num_evaluations and self._since < HOP:
            return
        self._since = 0
        self._evaluate(-p95(list(self._ttft_ms)))

    def failed(self, phase: int) -> None:
        """Do nothing: failures are ignored."""

    def return_to_safe(self) -> None:
        """Return to the initial weights and end the search."""
        self.weights = self.best = START
        self.is_over = True

    def _evaluate(self, score: float) -> None:
        self.num_evaluations += 1
        is_better = self.best_score is None or score > self.best_score * (1 + TOLERANCE)
        if is_better:
            self.best, self.best_score = self.weights, score
        self._outcomes.append(is_better)
        if len(self._outcomes) == SUCCESS_WINDOW:
            rate = sum(self._outcomes) / SUCCESS_WINDOW
            self.sigma *= SIGMA_FACTOR if rate < SUCCESS_TARGET else 1 / SIGMA_FACTOR
        self.is_over = self.sigma < SIGMA_FLOOR
        self.weights = self.best if self.is_over else self._mutated()

    def _mutated(self) -> tuple[float, ...]:
        steps = [exp(log(weight) + self.sigma * self._generator.gauss()) for weight in self.best]
        return tuple(
            min(max(weight, low), high) for weight, (low, high) in zip(steps, RANGES, strict=True)
        )

    def state(self) -> State:
        """Return the best weights and whether the search is over."""
        return {"incumbent": list(self.best), "is_over": int(self.is_over)}

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned; the search starts again unless it was over.

        Raises:
            UserError: The value is not such a state.
        """
        self.best = self.weights = tuple(numbers(state, "incumbent", len(START)))
        if state.get("is_over") not in (0, 1):
            raise UserError("saved state: is_over is neither 0 nor 1: remove the saved state")
        self.is_over = bool(state["is_over"])
