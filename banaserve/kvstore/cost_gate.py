"""Cost gate: how many blocks of a prefix to fetch, by predictors that learn online. Pure.

Nothing here reads a clock: callers pass what was done and how long it took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import numpy as np

from banaserve.kvstore.prefix_cut import (
    ALONE,
    FetchWork,
    HeldPrefix,
    PassCosts,
    StepBeside,
    best_cut,
    predict_steps,
)

_WINDOW = 64
_MIN_SAMPLES = 2
_RIDGE = 0.002
_ROBUST_ROUNDS = 4
_HUBER = 1.5
"""Residuals above this many typical ones count less, in proportion."""


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
        self._fitted: PassCosts | None = None

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
        share_s = self.predict_share(work)
        return None if share_s is None else self._coefficients().fixed_s + share_s

    def predict_share(self, work: FetchWork) -> float | None:
        """Seconds that ``work`` adds to a pass that runs anyway; None as above."""
        if (costs := self.costs) is None:
            return None
        return costs.token_s * work.tokens + costs.pair_s * work.attended

    @property
    def costs(self) -> PassCosts | None:
        """What passes cost; None before enough has been measured."""
        return self._coefficients() if self.is_ready else None

    def _coefficients(self) -> PassCosts:
        if self._fitted is None:
            self._fitted = _fit(np.asarray(self._samples, dtype=np.float64))
        return self._fitted


def _fit(samples: np.ndarray) -> PassCosts:
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
    return PassCosts(float(a), float(b), float(c))


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

    CUT fetches the first blocks behind computing the others. UNMEASURED fetches: a fetch is what
    the store is for, and it is measured by doing it. PROBE fetches although computing seems
    cheaper, once in a while, since a speed that is never measured again can never be seen to have
    recovered.
    """

    FETCH = "fetch"
    CUT = "cut"
    COMPUTE = "compute"
    UNMEASURED = "unmeasured"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and the predictions it rests on; None where nothing was measured yet.

    Attributes:
        fetched_blocks: So many from the first on are fetched.
        fetch_s: Fetching all of them.
        compute_s: What computing all of them adds to a pass.
        step_s: The step with what was decided, fetches that nothing hides included.
        spared_s: Of ``compute_s``, what the fetched blocks spare.
    """

    decision: GateDecision
    fetched_blocks: int
    fetch_s: float | None = None
    compute_s: float | None = None
    step_s: float | None = None
    spared_s: float | None = None


class CostGate:
    """Decides for one instance; owns its predictors.

    Args:
        num_layers: Of the model: while one is computed the next one is fetched.
        enabled: False fetches always (for measurements).
        probe_every: Of so many refusals in a row the last one becomes a PROBE.
    """

    def __init__(self, *, num_layers: int = 1, enabled: bool = True, probe_every: int = 32) -> None:
        self.compute = ComputePredictor()
        self.fetch = FetchPredictor()
        self.enabled = enabled
        self._num_layers = num_layers
        self._probe_every = probe_every
        self._num_refused = 0

    def decide(
        self, prefix: HeldPrefix, beside: StepBeside = ALONE, *, handed_over: bool = False
    ) -> Verdict:
        """How many blocks of ``prefix`` to fetch; the others are computed.

        Those that ``predict_steps`` says take least time, the most of them where several do.

        Args:
            prefix: What lies in the pool.
            beside: The step that the request joins, without it.
            handed_over: Another instance has computed the prefix for this request: doing that
                twice is never the answer, however slow copies are at the moment.
        """
        whole = prefix.num_blocks
        block_s, costs = self.fetch.predict(1), self.compute.costs
        fetch_s, compute_s = self.fetch.predict(whole), self.compute.predict_share(prefix.work)
        if block_s is None or costs is None:
            return Verdict(GateDecision.UNMEASURED, whole, fetch_s, compute_s)
        steps_s = predict_steps(prefix, costs, block_s, self._num_layers, beside)
        best = whole if handed_over or not self.enabled else best_cut(steps_s)
        decision = self._decision(best, whole)
        if decision is GateDecision.PROBE:
            best = whole
        spared = FetchWork.of(prefix.tokens_of(best), prefix.num_before)
        spared_s = self.compute.predict_share(spared)
        return Verdict(decision, best, fetch_s, compute_s, float(steps_s[best]), spared_s)

    def _decision(self, num_fetched: int, whole: int) -> GateDecision:
        if num_fetched:
            self._num_refused = 0
            return GateDecision.FETCH if num_fetched == whole else GateDecision.CUT
        self._num_refused += 1
        if self._num_refused < self._probe_every:
            return GateDecision.COMPUTE
        self._num_refused = 0
        return GateDecision.PROBE

    def block_budget_s(self, num_blocks: int, work: FetchWork) -> float:
        """Seconds that a tier below the pool may take for each of ``num_blocks``.

        What computing one would take, less its copy from the pool. 0 says that nothing is known,
        so the tier's own gate lets everything through.
        """
        compute_s = self.compute.predict_share(work)
        if not self.enabled or compute_s is None or num_blocks == 0:
            return 0.0
        fetch_s = self.fetch.predict(num_blocks) or 0.0
        return max((compute_s - fetch_s) / num_blocks, 1e-9)
