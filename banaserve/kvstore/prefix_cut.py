"""Predicted time of a step for each number of blocks that it fetches of a prefix. Pure.

KV blocks form a chain: a token attends to all before it, and vLLM computes what follows the blocks
that it has. So the first ``k`` of ``n`` blocks can be fetched and the rest be computed, layer by
layer in one pass, and the fetch of the next layer hides behind computing this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NO_LIMIT = 1 << 62
# Of splits that are predicted alike but for rounding, the one that fetches most is taken.
_ALIKE = 1 + 1e-9


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


class PassCosts(NamedTuple):
    """Seconds of a forward pass: ``fixed_s + token_s tokens + pair_s attended``; all >= 0."""

    fixed_s: float
    token_s: float
    pair_s: float


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Blocks of one request that lie in the pool, one after the other, and what is around them.

    Attributes:
        num_blocks: Blocks in the pool.
        block_tokens: Tokens of each but the last, which may bring fewer.
        num_tokens: Tokens that all of them bring.
        num_before: Tokens before them, which the engine has.
        num_after: Tokens behind them, which are computed in any case.
        is_whole: All of them are fetched or none: some hold a state behind the last token.
    """

    num_blocks: int
    block_tokens: int
    num_tokens: int
    num_before: int = 0
    num_after: int = 0
    is_whole: bool = False

    @property
    def work(self) -> FetchWork:
        """What fetching all of them spares."""
        return FetchWork.of(self.num_tokens, self.num_before)

    def tokens_of(self, num_blocks: int) -> int:
        """Tokens that the first ``num_blocks`` bring."""
        return min(num_blocks * self.block_tokens, self.num_tokens)


@dataclass(frozen=True, slots=True)
class StepBeside:
    """The step that the request joins, without it.

    Attributes:
        work: What the others in it compute.
        fetched_blocks: Blocks that it fetches for them.
        max_tokens: Most tokens of a step, of all requests together.
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
    """Seconds until the prompt is computed, for each number of blocks that are fetched.

    With ``f`` for all layers' fetches and ``c`` for the pass, both the same in each of ``L``
    layers, the first step takes ``max(f, c) + min(f, c) / L``: while a layer is computed the next
    one is fetched (BanaServe Eqs. 12 and 13), and nothing hides the first fetch or the last
    computation. What does not fit into the first step is computed in others, behind which nothing
    is fetched.

    Args:
        prefix: What can be fetched.
        costs: Of a forward pass.
        block_fetch_s: Seconds to fetch one block, all layers together.
        num_layers: 1 says that everything is fetched before anything is computed.
        beside: The step that the request joins.

    Returns:
        float64 ``[num_blocks + 1]``; what others in the step take is in each. Infinite where so
        many cannot be fetched.
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
    """Seconds of the steps after the first one; 0 where it has computed everything."""
    fixed_s = costs.fixed_s * np.ceil(tokens / max(beside.max_tokens, 1))
    return fixed_s + costs.token_s * tokens + costs.pair_s * _attended(tokens, before)


def _attended(tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
    return tokens * before + tokens * (tokens + 1) / 2


def best_cut(steps_s: np.ndarray) -> int:
    """The most blocks among those whose fetching takes least time, by ``predict_steps``."""
    return int(np.flatnonzero(steps_s <= steps_s.min() * _ALIKE)[-1])
