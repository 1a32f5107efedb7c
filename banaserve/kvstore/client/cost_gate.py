"""Cost gate: how many blocks of a prefix to fetch instead of computing them. Pure.

KV blocks form a chain: a token attends to all tokens before it, and vLLM computes the tokens after
the blocks that it has. So the first ``k`` of ``n`` blocks can be fetched and the rest be computed,
layer by layer in one pass, and the fetch of the next layer is hidden by computing the current one.

The predictors learn online. Nothing here reads a clock: callers pass the work that was done and the
time that it took.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

_NO_LIMIT = 1 << 62
# Of cuts whose predictions differ only by rounding, the one that fetches the most blocks is taken.
_ALIKE = 1 + 1e-9
_WINDOW = 64
_MIN_SAMPLES = 2
_MIN_TOKENS = 64
"""Minimum number of tokens of a pass to learn from."""
_RIDGE = 0.002
_ROBUST_ROUNDS = 4
_HUBER = 1.5
"""Multiple of the typical residual above which a sample's weight is reduced."""


@dataclass(frozen=True, slots=True)
class FetchWork:
    """Work of a forward pass, or of a part of it. Supports addition.

    Attributes:
        tokens: Number of computed tokens.
        attended: Number of pairs of a computed token and a token that it attends to.
    """

    tokens: int = 0
    attended: int = 0

    @classmethod
    def of(cls, num_tokens: int, num_before: int) -> FetchWork:
        """Return the work of ``num_tokens`` tokens of a sequence after ``num_before`` others."""
        return cls(num_tokens, num_tokens * num_before + num_tokens * (num_tokens + 1) // 2)

    def __add__(self, other: FetchWork) -> FetchWork:
        return FetchWork(self.tokens + other.tokens, self.attended + other.attended)


class PassCosts(NamedTuple):
    """Seconds of a forward pass: ``fixed_s + token_s tokens + pair_s attended``; all >= 0."""

    fixed_s: float
    token_s: float
    pair_s: float


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Consecutive blocks of one request in the pool, and the tokens before and after them.

    Attributes:
        block_tokens: Number of tokens of each block except the last, which may have fewer.
        num_tokens: Number of tokens of all blocks.
        num_before: Number of tokens before the blocks, which the engine has already.
        num_after: Number of tokens after the blocks, which are computed in any case.
        is_whole: True if all of the blocks are fetched or none, because some hold a state after
            the last token.
    """

    num_blocks: int
    block_tokens: int
    num_tokens: int
    num_before: int = 0
    num_after: int = 0
    is_whole: bool = False

    @property
    def work(self) -> FetchWork:
        """Work that fetching all blocks saves."""
        return FetchWork.of(self.num_tokens, self.num_before)

    def tokens_of(self, num_blocks: int) -> int:
        """Return the number of tokens of the first ``num_blocks`` blocks."""
        return min(num_blocks * self.block_tokens, self.num_tokens)


@dataclass(frozen=True, slots=True)
class StepBeside:
    """Step that a request joins, without that request.

    Attributes:
        work: Work of the other requests in the step.
        fetched_blocks: Number of blocks that the step fetches for them.
        max_tokens: Maximum number of tokens of a step, of all requests together.
    """

    work: FetchWork = FetchWork()
    fetched_blocks: int = 0
    max_tokens: int = _NO_LIMIT


ALONE = StepBeside()


def predict_steps(
    prefix: HeldPrefix,
    costs: PassCosts,
    block_fetch_s: float,
    num_layers: int,
    beside: StepBeside = ALONE,
) -> np.ndarray:
    """Predict the seconds until the prompt is computed, for each number of fetched blocks.

    With ``f`` for all layers' fetches and ``c`` for the pass, both the same in each of ``L``
    layers, the first step takes ``max(f, c) + min(f, c) / L``: while a layer is computed the next
    one is fetched (BanaServe Eqs. 12 and 13), and nothing hides the first fetch or the last
    computation. Tokens that do not fit into the first step are computed in later steps, which
    fetch nothing.

    Args:
        prefix: Prefix whose blocks can be fetched.
        costs: Costs of a forward pass.
        block_fetch_s: Seconds to fetch one block, all layers together.
        num_layers: Number of layers; 1 if everything is fetched before anything is computed.
        beside: Step that the request joins.

    Returns:
        float64 ``[num_blocks + 1]``, the time of the other requests in the step included. Infinite
        for a number of blocks that cannot be fetched.
    """
    num_fetched = np.arange(prefix.num_blocks + 1)
    brought = np.minimum(num_fetched * float(prefix.block_tokens), prefix.num_tokens)
    before = prefix.num_before + brought
    left = prefix.num_tokens - brought + prefix.num_after
    room = max(beside.max_tokens - beside.work.tokens, 1)
    first = np.minimum(left, room)
    compute_s = (
        costs.fixed_s
        + costs.token_s * (beside.work.tokens + first)
        + costs.pair_s * (beside.work.attended + _attended(first, before))
    )
    fetch_s = block_fetch_s * (num_fetched + beside.fetched_blocks)
    shorter_s, longer_s = np.minimum(fetch_s, compute_s), np.maximum(fetch_s, compute_s)
    later_s = _later_s(left - first, before + first, costs, beside)
    steps_s = longer_s + shorter_s / num_layers + later_s
    if prefix.is_whole:
        steps_s[1:-1] = np.inf
    return steps_s


def _later_s(
    tokens: np.ndarray, before: np.ndarray, costs: PassCosts, beside: StepBeside
) -> np.ndarray:
    """Return the seconds of the steps after the first one; 0 if that computes everything."""
    fixed_s = costs.fixed_s * np.ceil(tokens / max(beside.max_tokens, 1))
    return fixed_s + costs.token_s * tokens + costs.pair_s * _attended(tokens, before)


def _attended(tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
    return tokens * before + tokens * (tokens + 1) / 2


def best_cut(steps_s: np.ndarray) -> int:
    """Return the number of blocks of the shortest time in ``steps_s``, the largest of several."""
    return int(np.flatnonzero(steps_s <= steps_s.min() * _ALIKE)[-1])


class ComputePredictor:
    """Predictor of a forward pass's seconds: ``a + b tokens + c attended``, with a, b, c >= 0.

    It is fitted to the last 64 passes that computed enough tokens to be prefill: those with fewer
    are bound by memory. Decoding requests that share a pass are part of its work, not noise: each
    adds a token and the tokens that it attends to. A pass that was delayed (a busy machine, a first
    call) has the less weight the larger its residual. If the passes do not distinguish a, b and c,
    the whole time is attributed to b: otherwise a few similar passes, some of them delayed, could
    seem to take the same time for any number of tokens, as if more tokens cost nothing.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=_WINDOW)
        self._fitted: PassCosts | None = None

    def observe(self, work: FetchWork, seconds: float) -> bool:
        """Learn from a pass; return whether it was used."""
        if work.tokens < _MIN_TOKENS or not 0 < seconds < float("inf"):
            return False
        self._samples.append((float(work.tokens), float(work.attended), seconds))
        self._fitted = None
        return True

    def predict_pass(self, work: FetchWork) -> float | None:
        """Return the seconds of a whole pass; None before enough passes have been measured."""
        share_s, costs = self.predict_share(work), self.costs
        return None if share_s is None or costs is None else costs.fixed_s + share_s

    def predict_share(self, work: FetchWork) -> float | None:
        """Return the seconds that ``work`` adds to a pass that runs anyway; None if not ready."""
        if (costs := self.costs) is None:
            return None
        return costs.token_s * work.tokens + costs.pair_s * work.attended

    @property
    def costs(self) -> PassCosts | None:
        """Fitted costs of a pass; None before enough passes have been measured."""
        if self._fitted is None and len(self._samples) >= _MIN_SAMPLES:
            self._fitted = _fit(np.asarray(self._samples, dtype=np.float64))
        return self._fitted


def _fit(samples: np.ndarray) -> PassCosts:
    """Fit a robust ridge regression, >= 0, to ``[num, 3]``: tokens, attended, seconds."""
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
    """Minimize squared relative errors; drop the most negative coefficient until none is left."""
    # Relative errors: a pass of 64 tokens has the same weight as one of 2,048.
    root = np.sqrt(weights) / target
    rows, goal = columns * root[:, None], target * root
    level = float(np.average(target, weights=weights))
    # The penalty on b is nearly zero, so that time that the data cannot attribute goes to b.
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
    """Predictor of the seconds to copy blocks from the pool, by the last fetches' median speed."""

    def __init__(self) -> None:
        self._seconds_per_block: deque[float] = deque(maxlen=_WINDOW)

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Learn from a fetch of whole blocks, all layers together."""
        if num_blocks > 0 and 0 < seconds < float("inf"):
            self._seconds_per_block.append(seconds / num_blocks)

    def predict(self, num_blocks: int) -> float | None:
        """Return the seconds for ``num_blocks``; None before the first measurement."""
        if not self._seconds_per_block:
            return None
        return float(np.median(self._seconds_per_block)) * num_blocks


class GateDecision(Enum):
    """Decision of the gate.

    CUT fetches the first blocks while the others are computed. UNMEASURED fetches, because only a
    fetch can be measured and fetching is the purpose of the store. PROBE fetches now and then
    although computing seems cheaper, since a recovered speed is noticed only by a measurement.
    """

    FETCH = "fetch"
    CUT = "cut"
    COMPUTE = "compute"
    UNMEASURED = "unmeasured"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Decision of the gate with its predictions, which are None if nothing was measured yet.

    Attributes:
        fetched_blocks: Number of blocks to fetch, from the first on.
        fetch_s: Time to fetch all blocks of the prefix, in seconds.
        compute_s: Time that computing all blocks of the prefix adds to a pass, in seconds.
        step_s: Duration of the step with this decision, in seconds, including fetches that no
            computation hides.
        spared_s: Part of ``compute_s`` that the fetched blocks save.
    """

    decision: GateDecision
    fetched_blocks: int
    fetch_s: float | None = None
    compute_s: float | None = None
    step_s: float | None = None
    spared_s: float | None = None


class CostGate:
    """Gate of one instance, with its predictors.

    Args:
        num_layers: Number of layers of the model: while a layer is computed the next is fetched.
        enabled: False to fetch always (for measurements).
        probe_every: Number of consecutive refusals of which the last one becomes a PROBE.
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
        """Decide how many blocks of ``prefix`` to fetch; the others are computed.

        The number is the one with the shortest step by ``predict_steps``, the largest of several.

        Args:
            prefix: Prefix whose blocks are in the pool.
            beside: Step that the request joins, without the request.
            handed_over: True if another instance has computed the prefix for this request: then it
                is never computed again, however slow copies are at the moment.
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
        """Return the seconds that a tier below the pool may take for each of ``num_blocks``.

        This is the time to compute a block less the time to copy it from the pool. 0 means
        unknown: the tier's own gate then fetches every block.
        """
        compute_s = self.compute.predict_share(work)
        if not self.enabled or compute_s is None or num_blocks == 0:
            return 0.0
        fetch_s = self.fetch.predict(num_blocks) or 0.0
        return max((compute_s - fetch_s) / num_blocks, 1e-9)
