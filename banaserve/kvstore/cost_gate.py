"""Cost gate: fetch a prefix or compute it, by predictors that learn online. Pure.

Nothing here reads a clock: callers pass what was done and how long it took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np

_WINDOW = 64
_MIN_SAMPLES = 2
_RIDGE = 0.002
_ROBUST_ROUNDS = 4
_HUBER = 1.5
"""Residuals above this many typical ones count less, in proportion."""


@dataclass(frozen=True, slots=True)
class FetchWork:
    """What a forward pass computes, or part of it. Adds up.

    Attributes:
        tokens: Tokens computed.
        attended: Pairs of a computed token and a token it attends to.
    """

    tokens: int = 0
    attended: int = 0

    @classmethod
    def of(cls, num_tokens: int, num_before: int) -> FetchWork:
        """Of ``num_tokens`` tokens of one sequence that come after ``num_before`` others."""
        return cls(num_tokens, num_tokens * num_before + num_tokens * (num_tokens + 1) // 2)

    def __add__(self, other: FetchWork) -> FetchWork:
        return FetchWork(self.tokens + other.tokens, self.attended + other.attended)


class ComputePredictor:
    """Seconds that a forward pass takes: ``a + b tokens + c attended``, with a, b, c >= 0.

    Fitted to the last 64 passes that computed enough tokens to be prefill. Decoding requests that
    share a pass are part of its work, not noise: they add a token each and what it attends to. A
    pass that was held up (a busy machine, a first call) counts less the farther it lies off. Where
    the passes do not tell a, b and c apart, all goes to b: a few alike, some of them held up, may
    seem to take the same time however much they compute, and more tokens to cost nothing.

    Args:
        min_tokens: Passes with fewer tokens teach nothing: they are bound by memory, not compute.
    """

    def __init__(self, min_tokens: int = 64) -> None:
        self._min_tokens = min_tokens
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._fitted: tuple[float, float, float] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether enough has been measured to predict."""
        return len(self._samples) >= _MIN_SAMPLES

    def observe(self, work: FetchWork, seconds: float) -> bool:
        """Learn from a pass; whether it teaches anything."""
        if work.tokens < self._min_tokens or not 0 < seconds < float("inf"):
            return False
        self._samples.append((float(work.tokens), float(work.attended), seconds))
        self._fitted = None
        return True

    def predict_pass(self, work: FetchWork) -> float | None:
        """Seconds of a whole pass; None before enough has been measured."""
        if not self.is_ready:
            return None
        fixed, per_token, per_pair = self._coefficients()
        return fixed + per_token * work.tokens + per_pair * work.attended

    def predict_share(self, work: FetchWork) -> float | None:
        """Seconds that ``work`` adds to a pass that runs anyway; None as above."""
        if not self.is_ready:
            return None
        _, per_token, per_pair = self._coefficients()
        return per_token * work.tokens + per_pair * work.attended

    def _coefficients(self) -> tuple[float, float, float]:
        if self._fitted is None:
            self._fitted = _fit(np.asarray(self._samples, dtype=np.float64))
        return self._fitted


def _fit(samples: np.ndarray) -> tuple[float, float, float]:
    """Robust ridge regression with coefficients >= 0.

    Args:
        samples: ``[num, 3]``: tokens, attended, seconds.
    """
    tokens, attended, seconds = samples.T
    columns = np.stack([np.ones_like(tokens), tokens, attended], axis=1)
    scale = np.maximum(columns.mean(axis=0), 1e-12)
    columns = columns / scale
    weights = np.ones(len(samples))
    found = np.zeros(3)
    for _ in range(_ROBUST_ROUNDS):
        found = _non_negative_ridge(columns, seconds, weights)
        residuals = np.abs(seconds - columns @ found) / seconds
        typical = max(float(np.median(residuals)), 1e-3)
        weights = np.minimum(1.0, _HUBER * typical / np.maximum(residuals, 1e-12)) ** 2
    a, b, c = found / scale
    return float(a), float(b), float(c)


def _non_negative_ridge(columns: np.ndarray, target: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Least squares of relative errors; drops the most negative coefficient until none is left."""
    # Relative errors: a pass of 64 tokens says as much as one of 2,048.
    root = np.sqrt(weights) / target
    rows, goal = columns * root[:, None], target * root
    level = float(np.average(target, weights=weights))
    # The penalty spares b, so that what the data cannot tell apart falls to it.
    penalty = np.diag([1.0, 1e-6, 1.0]) * _RIDGE * float(weights.sum()) / max(level, 1e-12) ** 2
    active = [0, 1, 2]
    found = np.zeros(3)
    while active:
        inner = rows[:, active]
        normal = inner.T @ inner + penalty[np.ix_(active, active)]
        solved = np.linalg.solve(normal, inner.T @ goal)
        if (solved >= 0).all():
            found[active] = solved
            break
        del active[int(np.argmin(solved))]
    if not found[1:].any():
        found = np.array([0.0, float(rows[:, 1] @ goal) / float(rows[:, 1] @ rows[:, 1]), 0.0])
    return found


class FetchPredictor:
    """Seconds to copy blocks from the pool, from the median speed of the last fetches."""

    def __init__(self) -> None:
        self._seconds_per_block: deque[float] = deque(maxlen=_WINDOW)

    @property
    def is_ready(self) -> bool:
        return bool(self._seconds_per_block)

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from a fetch of whole blocks, all layers together."""
        if num_blocks > 0 and 0 < seconds < float("inf"):
            self._seconds_per_block.append(seconds / num_blocks)

    def predict(self, num_blocks: int) -> float | None:
        """Seconds for ``num_blocks``; None before anything was measured."""
        if not self._seconds_per_block:
            return None
        return float(np.median(self._seconds_per_block)) * num_blocks


class GateDecision(Enum):
    """Decision of the gate.

    UNMEASURED fetches: a fetch is what the store is for, and it is measured by doing it. PROBE
    fetches although computing seems cheaper, once in a while, since a speed that is never measured
    again can never be seen to have recovered.
    """

    FETCH = "fetch"
    COMPUTE = "compute"
    UNMEASURED = "unmeasured"
    PROBE = "probe"

    @property
    def fetches(self) -> bool:
        return self is not GateDecision.COMPUTE


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and the predictions it rests on; None where nothing was measured yet."""

    decision: GateDecision
    fetch_s: float | None
    compute_s: float | None


class CostGate:
    """Decides for one instance; owns its predictors.

    Args:
        enabled: False fetches always (for measurements).
        probe_every: Of so many refusals in a row the last one becomes a PROBE.
    """

    def __init__(self, *, enabled: bool = True, probe_every: int = 32) -> None:
        self.compute = ComputePredictor()
        self.fetch = FetchPredictor()
        self._enabled = enabled
        self._probe_every = probe_every
        self._num_refused = 0

    def decide(self, num_blocks: int, work: FetchWork, *, handed_over: bool = False) -> Verdict:
        """Whether to fetch ``num_blocks`` or to do ``work`` instead.

        Args:
            handed_over: Another instance has done ``work`` for this request: doing it twice is
                never the answer, however slow copies are at the moment.
        """
        fetch_s, compute_s = self.fetch.predict(num_blocks), self.compute.predict_share(work)
        if fetch_s is None or compute_s is None:
            return Verdict(GateDecision.UNMEASURED, fetch_s, compute_s)
        if fetch_s < compute_s or not self._enabled or handed_over:
            self._num_refused = 0
            return Verdict(GateDecision.FETCH, fetch_s, compute_s)
        self._num_refused += 1
        if self._num_refused >= self._probe_every:
            self._num_refused = 0
            return Verdict(GateDecision.PROBE, fetch_s, compute_s)
        return Verdict(GateDecision.COMPUTE, fetch_s, compute_s)

    def block_budget_s(self, num_blocks: int, work: FetchWork) -> float:
        """Seconds that a tier below the pool may take for each of ``num_blocks``.

        What computing one would take, less its copy from the pool. 0 says that nothing is known,
        so the tier's own gate lets everything through.
        """
        compute_s = self.compute.predict_share(work)
        if not self._enabled or compute_s is None or num_blocks == 0:
            return 0.0
        fetch_s = self.fetch.predict(num_blocks) or 0.0
        return max((compute_s - fetch_s) / num_blocks, 1e-9)
