"""Lengths and numbers of requests to probe a server with, within a budget of time. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, exp, log
from random import Random
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.sim.trace import Arrival
from banaserve_bench.plan.probe.fit import MeasuredStep, StepFit

SHORTEST = 16
"""Tokens of the shortest prompt: a block of KV."""
DECODE_STEPS = 12
"""Number of steps over which the time of a decode step is averaged."""
_PROMPTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
_HELD_OUT_PROMPTS = (3 / 16, 3 / 8, 5 / 8, 7 / 8)
"""Prompts of one round, as shares of the longest one."""
_LONGEST = tuple(64 * 2**n for n in reversed(range(10)))
_BATCHES = (64, 32, 16, 8, 4)
_PROMPTS_SHARE, _BATCHES_SHARE, _MIXED_SHARE = 0.09, 0.13, 0.09
"""Most time of the parts of one round, as shares of the budget: some three rounds fit."""
_MIXED_REQUESTS = 12
_MIXED_OUTPUTS = (8, 24)
_MARGIN_STEPS = 3


class ProbeLimits(NamedTuple):
    """Most tokens of a probe: of a request, of all requests together, and of a step."""

    context_tokens: int
    kv_tokens: int
    step_tokens: int


class PromptProbe(NamedTuple):
    """Prompt that is sent alone."""

    tokens: int
    is_fitted: bool


class BatchProbe(NamedTuple):
    """Requests that decode together.

    Attributes:
        prompt_tokens: Number of prompt tokens of each of them.
    """

    batch: int
    prompt_tokens: int
    is_fitted: bool

    def output_tokens(self, step_tokens: int) -> int:
        """Return a length at which the first one still decodes once the last prompt is computed."""
        prompts = ceil(self.batch * self.prompt_tokens / step_tokens)
        return DECODE_STEPS + prompts + _MARGIN_STEPS


class ProbePlan(NamedTuple):
    """Probes of one round; those that are not fitted judge the fit.

    Attributes:
        mixed_tokens: Longest prompt of the requests that arrive while others decode.
    """

    prompts: Sequence[PromptProbe]
    batches: Sequence[BatchProbe]
    mixed_tokens: int


def plan_of(rough: StepFit, budget_s: float, limits: ProbeLimits) -> ProbePlan:
    """Return the largest probes of which some three rounds fit into ``budget_s``.

    Args:
        rough: First estimate of the step times.

    Raises:
        UserError: Not even the smallest ones fit.
    """
    most = min(limits.context_tokens // 2, limits.kv_tokens // 2)
    for longest in (one for one in _LONGEST if one <= most):
        prompts = _prompts(longest)
        took_s = sum(_prompt_s(rough, one.tokens, limits) for one in prompts)
        batches = _batches(rough, longest, _BATCHES_SHARE * budget_s, limits)
        if took_s <= _PROMPTS_SHARE * budget_s and batches:
            return ProbePlan(prompts, batches, _mixed(rough, longest, budget_s, limits))
    raise UserError(
        "the server is too slow for --duration, or its context too small: give a longer --duration"
    )


def mixed_load(draws: Random, most: int, rough: StepFit, limits: ProbeLimits) -> list[Arrival]:
    """Return requests of unlike lengths that arrive while others are served."""
    gap_s = _alone_s(rough, most, limits) / 2
    at_s, found = 0.0, []
    for _ in range(_MIXED_REQUESTS):
        tokens = round(exp(draws.uniform(log(SHORTEST), log(most))))
        found.append(Arrival(at_s, tokens, draws.randint(*_MIXED_OUTPUTS)))
        at_s += draws.expovariate(1 / gap_s)
    return found


def num_steps(tokens: int, limits: ProbeLimits) -> int:
    """Return the number of steps that compute a prompt."""
    return ceil(tokens / limits.step_tokens)


def _prompts(longest: int) -> list[PromptProbe]:
    fitted = {SHORTEST, *(max(4, round(share * longest)) for share in _PROMPTS)}
    held_out = {max(4, round(share * longest)) for share in _HELD_OUT_PROMPTS} - fitted
    return [
        *(PromptProbe(tokens, True) for tokens in sorted(fitted)),
        *(PromptProbe(tokens, False) for tokens in sorted(held_out)),
    ]


def _batches(
    rough: StepFit, longest: int, budget_s: float, limits: ProbeLimits
) -> list[BatchProbe]:
    """Return the batches with the most tokens that fit; none if no batch does."""
    found: list[BatchProbe] = []
    most = 0
    for batch in _BATCHES:
        for context in (longest, longest // 2, longest // 4, longest // 8):
            if context < 4 * SHORTEST or batch * context // 4 > limits.kv_tokens // 2:
                continue
            tried = list(dict.fromkeys(_grid(batch, context)))
            took_s = sum(_batch_s(rough, one, limits) for one in tried)
            if took_s <= budget_s and batch * context > most:
                most, found = batch * context, tried
    return found


def _grid(batch: int, context: int) -> Iterator[BatchProbe]:
    """Yield batches with few and with many tokens, and held-out ones between them."""
    short = SHORTEST
    fitted = (1, short), (1, context), (batch // 4, context // 4), (batch, short)
    for one in (*fitted, (batch, context // 4)):
        yield BatchProbe(*one, True)
    for one in ((1, context // 2), (batch // 2, context // 8), (batch // 2, context // 4)):
        yield BatchProbe(*one, False)


def _mixed(rough: StepFit, longest: int, budget_s: float, limits: ProbeLimits) -> int:
    """Return the longest prompt of mixed requests that fit; at least a short one."""
    tokens = longest // 2
    while tokens > 2 * SHORTEST:
        if _MIXED_REQUESTS / 2 * _alone_s(rough, tokens, limits) <= _MIXED_SHARE * budget_s:
            break
        tokens //= 2
    return tokens


def _alone_s(rough: StepFit, tokens: int, limits: ProbeLimits) -> float:
    """Return the time of a request of mean length and no other."""
    decode_s = rough.predicted_s(MeasuredStep(0, 1, tokens / 2, ()))
    return _prompt_s(rough, tokens // 2, limits) + sum(_MIXED_OUTPUTS) / 2 * decode_s


def _prompt_s(rough: StepFit, tokens: int, limits: ProbeLimits) -> float:
    return rough.predicted_s(MeasuredStep(tokens, 0, 0, (), num_steps(tokens, limits)))


def _batch_s(rough: StepFit, one: BatchProbe, limits: ProbeLimits) -> float:
    prompts_s = one.batch * _prompt_s(rough, one.prompt_tokens, limits)
    step_s = rough.predicted_s(MeasuredStep(0, one.batch, one.prompt_tokens, ()))
    return prompts_s + one.output_tokens(limits.step_tokens) * step_s
