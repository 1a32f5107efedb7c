"""Online tuning of weights: a (1+1) evolution strategy, robust to chance and to a gamed objective.

It is GORGO's strategy with these repairs:
  - A candidate is judged only by requests sent under it, relative to the incumbent measured right
    before it. GORGO's windows overlap, so that three quarters of a score come from earlier
    candidates, and the incumbent's score is never measured again.
  - Scores are costs above 0, and less is better. GORGO's are negative, so that its condition of
    0.5 % more accepts 0.5 % less.
  - The objective is the product of both p95, time to first token and end-to-end time, and a
    candidate with a longer end-to-end time is rejected: sending all requests to one near replica
    would give the best times to first token.
  - A small step size does not prove an optimum; the search pauses and starts again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil, exp, isfinite, log

from banaserve.base.errors import UserError
from banaserve_route.policies.interface import Generator, State
from banaserve_route.policies.policy import check_range

INCUMBENT, CANDIDATE, SAFE, REST = "incumbent", "candidate", "safe", "rest"


@dataclass(frozen=True, slots=True)
class TunerOptions:
    """Options of the evolution strategy.

    Attributes:
        window: Number of requests of a measurement.
        low: Minimum of a weight.
        high: Maximum of a weight.
        sigma: Initial step size of a weight's logarithm.
        sigma_floor: Step size below which the search pauses.
        sigma_factor: Factor by which the step size shrinks; it grows by the inverse.
        success_window: Number of evaluations over which the success rate is computed.
        success_target: Target of the success rate, from the 1/5 rule.
        tolerance: Relative improvement that a candidate must exceed.
        max_e2e_ratio: Maximum ratio of a candidate's end-to-end p95 to the incumbent's.
        failure_ms: Time that a failed request counts as, for both times, in milliseconds.
        safe_every: Number of evaluations of which one is of the safe weights.
        rest_windows: Number of windows without a candidate after the step size has reached its
            floor.
    """

    window: int = 64
    low: float = 0.1
    high: float = 10.0
    sigma: float = 0.5
    sigma_floor: float = 0.05
    sigma_factor: float = 0.817
    success_window: int = 8
    success_target: float = 0.2
    tolerance: float = 0.02
    max_e2e_ratio: float = 1.05
    failure_ms: float = 60_000.0
    safe_every: int = 8
    rest_windows: int = 16

    def __post_init__(self) -> None:
        check_range(
            self,
            {
                "window": (8, 1e6),
                "low": (1e-6, 1),
                "high": (1, 1e6),
                "sigma": (1e-3, 5),
                "sigma_floor": (1e-4, 5),
                "sigma_factor": (0.1, 0.99),
                "success_window": (1, 1000),
                "success_target": (0.01, 0.99),
                "tolerance": (0, 1),
                "max_e2e_ratio": (1, 100),
                "failure_ms": (1, 1e9),
                "safe_every": (2, 1e9),
                "rest_windows": (0, 1e9),
            },
        )


def p95(values: list[float]) -> float:
    """Return the 95th percentile by nearest rank."""
    ranked = sorted(values)
    return ranked[ceil(0.95 * len(ranked)) - 1]


class Tuner:
    """Weights in use, and the times that were measured with them.

    Attributes:
        phase: Number of the measurement. A sample belongs to the phase in which its request was
            sent; samples of other phases are dropped.
        weights: Weights to use in this phase.
        num_bound_hits: Number of candidates clipped to ``low`` or ``high``; many of them show that
            the bounds, not the traffic, decide.
    """

    def __init__(
        self, safe: tuple[float, ...], options: TunerOptions, generator: Generator
    ) -> None:
        """Start from the weights ``safe``, also used for returns; all 1 is the unweighted cost."""
        self.safe = safe
        self.options = options
        self.phase = 0
        self.weights = safe
        self.incumbent = safe
        self.sigma = options.sigma
        self.num_evaluations = self.num_accepted = self.num_bound_hits = 0
        self.num_returns = self.num_restarts = 0
        self._generator = generator
        self._kind = INCUMBENT
        self._resting = 0
        self._outcomes: deque[bool] = deque(maxlen=options.success_window)
        self._ttft_ms: list[float] = []
        self._e2e_ms: list[float] = []
        self._measured: tuple[float, float] | None = None

    def sample(self, phase: int, ttft_ms: float, e2e_ms: float) -> None:
        """Add a finished request that was sent in ``phase``."""
        if phase != self.phase or not (isfinite(ttft_ms) and isfinite(e2e_ms)):
            return
        self._ttft_ms.append(max(ttft_ms, 1e-3))
        self._e2e_ms.append(max(e2e_ms, 1e-3))
        if len(self._ttft_ms) >= self.options.window or self._is_hopeless():
            self._conclude(p95(self._ttft_ms), p95(self._e2e_ms))

    def failed(self, phase: int) -> None:
        """Add a request of ``phase`` that got no answer, with a time that never scores well."""
        self.sample(phase, self.options.failure_ms, self.options.failure_ms)

    def return_to_safe(self) -> None:
        """Return to the safe weights at once; the search continues from them."""
        self.incumbent = self.safe
        self.num_returns += 1
        self._begin(INCUMBENT, self.safe)

    def _is_hopeless(self) -> bool:
        """Return whether over half a window of a candidate already exceeds the end-to-end limit."""
        if self._kind != CANDIDATE or self._measured is None:
            return False
        limit = self._measured[1] * self.options.max_e2e_ratio
        bad = sum(value > limit for value in self._e2e_ms)
        return 2 * bad > self.options.window

    def _conclude(self, ttft_ms: float, e2e_ms: float) -> None:
        if self._kind == REST:
            self._resting -= 1
            self._begin(*((REST, self.incumbent) if self._resting > 0 else self._next_pair()))
        elif self._kind == INCUMBENT:
            self._measured = (ttft_ms, e2e_ms)
            self._begin(*self._challenger())
        else:
            self._judge(ttft_ms, e2e_ms)
            self._begin(*self._next_pair())

    def _judge(self, ttft_ms: float, e2e_ms: float) -> None:
        assert self._measured is not None
        known_ttft, known_e2e = self._measured
        gain = log(known_ttft) + log(known_e2e) - log(ttft_ms) - log(e2e_ms)
        is_better = (
            gain > log(1 + self.options.tolerance)
            and e2e_ms <= known_e2e * self.options.max_e2e_ratio
        )
        self.num_evaluations += 1
        if is_better:
            self.incumbent = self.weights
        if self._kind == SAFE:
            self.num_returns += is_better
            return
        self.num_accepted += is_better
        self._outcomes.append(is_better)
        self._adapt()

    def _adapt(self) -> None:
        options = self.options
        if len(self._outcomes) < options.success_window:
            return
        rate = sum(self._outcomes) / len(self._outcomes)
        if rate < options.success_target:
            self.sigma *= options.sigma_factor
        else:
            self.sigma = min(self.sigma / options.sigma_factor, 2 * options.sigma)
        if self.sigma < options.sigma_floor:
            self.sigma = options.sigma
            self._outcomes.clear()
            self._resting = options.rest_windows
            self.num_restarts += 1

    def _next_pair(self) -> tuple[str, tuple[float, ...]]:
        return (REST if self._resting > 0 else INCUMBENT), self.incumbent

    def _challenger(self) -> tuple[str, tuple[float, ...]]:
        is_turn = self.num_evaluations % self.options.safe_every == self.options.safe_every - 1
        if is_turn and self.incumbent != self.safe:
            return SAFE, self.safe
        options = self.options
        tried = [
            exp(log(weight) + self.sigma * self._generator.gauss()) for weight in self.incumbent
        ]
        cut = tuple(min(max(weight, options.low), options.high) for weight in tried)
        self.num_bound_hits += cut != tuple(tried)
        return CANDIDATE, cut

    def _begin(self, kind: str, weights: tuple[float, ...]) -> None:
        self.phase += 1
        self._kind, self.weights = kind, weights
        self._ttft_ms, self._e2e_ms = [], []

    def state(self) -> State:
        """Return the state that survives a restart: the incumbent and progress of the search."""
        return {
            "incumbent": list(self.incumbent),
            "sigma": self.sigma,
            "outcomes": [float(outcome) for outcome in self._outcomes],
            "num_evaluations": self.num_evaluations,
            "num_accepted": self.num_accepted,
            "num_bound_hits": self.num_bound_hits,
            "num_returns": self.num_returns,
            "num_restarts": self.num_restarts,
        }

    def restore(self, state: State) -> None:
        """Restore what ``state`` returned; the search begins by measuring the incumbent.

        Raises:
            UserError: A value is missing or out of range; nothing has changed.
        """
        incumbent = tuple(numbers(state, "incumbent", len(self.safe)))
        if not all(self.options.low <= weight <= self.options.high for weight in incumbent):
            raise UserError(f"saved weights {incumbent} are out of bounds: remove the saved state")
        [sigma] = numbers({"sigma": [state.get("sigma", "missing")]}, "sigma", 1)
        if not 0 < sigma <= 10:
            raise UserError(f"saved sigma is {sigma:g}: remove the saved state")
        outcomes = numbers(state, "outcomes", None)
        counts = {name: count(state, name) for name in COUNTS}
        self.incumbent, self.sigma = incumbent, sigma
        self._outcomes = deque(map(bool, outcomes), maxlen=self.options.success_window)
        for name, value in counts.items():
            setattr(self, name, value)
        self._measured = None
        self._begin(INCUMBENT, incumbent)


COUNTS = ("num_evaluations", "num_accepted", "num_bound_hits", "num_returns", "num_restarts")


def numbers(state: object, name: str, length: int | None) -> list[float]:
    """Return the list of finite numbers that ``state`` has under ``name``.

    Raises:
        UserError: The value is no such list, or does not have ``length`` numbers.
    """
    values = state.get(name) if isinstance(state, dict) else None
    if (
        not isinstance(values, list)
        or (length is not None and len(values) != length)
        or not all(type(value) in (int, float) and isfinite(value) for value in values)
    ):
        raise UserError(f"saved state: {name} is {values!r}: remove the saved state")
    return [float(value) for value in values]


def count(state: State, name: str) -> int:
    """Return the count that ``state`` has under ``name``.

    Raises:
        UserError: The value is not a count.
    """
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"saved state: {name} is {value!r}: remove the saved state")
    return value
