"""Predicted time of a step for each number of blocks that it fetches of a prefix. Pure.

KV blocks form a chain: a token attends to all tokens before it, and vLLM computes the tokens after
the blocks that it has. So the first ``k`` of ``n`` blocks can be fetched and the rest be computed,
layer by layer in one pass, and the fetch of the next layer is hidden by computing the current one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_NO_LIMIT = 1 << 62
# Of cuts whose predictions differ only by rounding, the one that fetches the most blocks is taken.
_ALIKE = 1 + 1e-9


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
        num_blocks: Number of the blocks.
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
