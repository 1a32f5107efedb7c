"""GORGO's (1+1) evolution strategy exactly as in its code, with its faults, for comparison."""

from __future__ import annotations

from collections import deque
from math import ceil, exp, isfinite, log

from banaserve.base.errors import UserError
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

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.start_anew()

    def start_anew(self) -> None:
        """Return to the initial weights and begin the search again."""
        self.weights: tuple[float, ...] = START
        self.sigma = SIGMA
        self.best: tuple[float, ...] = START
        self.best_score: float | None = None
        self.num_evaluations = 0
        self.is_over = False
        self._ttft_ms: deque[float] = deque(maxlen=WINDOW)
        self._since = 0
        self._outcomes: deque[bool] = deque(maxlen=SUCCESS_WINDOW)

    def sample(self, ttft_ms: float) -> None:
        """Add a finished request, whatever weights it was sent under."""
        self._ttft_ms.append(ttft_ms)
        self._since += 1
        if self.is_over or len(self._ttft_ms) < WINDOW:
            return
        if self.num_evaluations and self._since < HOP:
            return
        self._since = 0
        self._evaluate(-p95(list(self._ttft_ms)))

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
            UserError: The value is not such a state; nothing has changed.
        """
        best = tuple(numbers(state, "incumbent", len(START)))
        if state.get("is_over") not in (0, 1):
            raise UserError("saved state: is_over is neither 0 nor 1: remove the saved state")
        self.best = self.weights = best
        self.is_over = bool(state["is_over"])


def p95(values: list[float]) -> float:
    """Return the 95th percentile by nearest rank."""
    ranked = sorted(values)
    return ranked[ceil(0.95 * len(ranked)) - 1]


def numbers(state: object, name: str, length: int) -> list[float]:
    """Return the list of finite numbers that ``state`` has under ``name``.

    Raises:
        UserError: The value is no such list, or does not have ``length`` numbers.
    """
    values = state.get(name) if isinstance(state, dict) else None
    if (
        not isinstance(values, list)
        or len(values) != length
        or not all(type(value) in (int, float) and isfinite(value) for value in values)
    ):
        raise UserError(f"saved state: {name} is {values!r}: remove the saved state")
    return [float(value) for value in values]
