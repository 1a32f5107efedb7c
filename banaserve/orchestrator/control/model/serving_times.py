"""Predicted times of a request at one instance, and its cost for the other requests there. Pure.

A step takes a + b n + c n^2 + d context + e batch (``learnt_time.py:step_time``). Prompts are
computed in steps of limited size, in the order of arrival, together with one token for each request
that decodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil, exp
from typing import NamedTuple

from banaserve.base.types import InstanceView

_LEAST_CHUNK_TOKENS = 64
_MOST_PREFILL_SHARE = 0.9
"""Maximum share of an instance's time for prefill: near 1, the formula gives infinite times."""
_KV_KEPT_FREE_FRACTION = 0.02


class LegLoad(NamedTuple):
    """Tokens of a request at the instance that computes its prompt.

    Attributes:
        to_compute: Prompt tokens to compute, at least one.
        fetched: Prompt tokens whose KV is fetched from the store.
        output: Expected number of output tokens.
        resident: Prompt tokens whose KV is already in the instance's own cache.
    """

    to_compute: int
    fetched: int
    output: float
    resident: int = 0

    @property
    def prompt(self) -> int:
        return self.to_compute + self.fetched + self.resident

    @property
    def pairs(self) -> int:
        return self.to_compute * (self.to_compute + 2 * (self.fetched + self.resident))

    def where(self, resident: int) -> LegLoad:
        """Return the leg at an instance that has the KV of ``resident`` tokens of its prompt.

        Resident tokens are neither fetched nor computed; one token is always computed.
        """
        resident = min(resident, self.prompt - 1)
        known = max(self.fetched, resident)
        return LegLoad(self.prompt - known, known - resident, self.output, resident)


class RecentPrompts(NamedTuple):
    """Recent rates of prompts: computed tokens, attention pairs and prompts per second.

    The rates are of tokens, not of time, since the cost of a token is often learnt only later.
    """

    tokens_per_s: float = 0.0
    pairs_per_s: float = 0.0
    prompts_per_s: float = 0.0

    def after(self, age_s: float, window_s: float) -> RecentPrompts:
        """Return the rates after ``age_s`` without a prompt, smoothed over ``window_s``."""
        kept = exp(-age_s / window_s)
        return RecentPrompts(
            self.tokens_per_s * kept, self.pairs_per_s * kept, self.prompts_per_s * kept
        )

    def and_one(self, leg: LegLoad, window_s: float) -> RecentPrompts:
        """Return the rates after the arrival of the prompt of ``leg``."""
        return RecentPrompts(
            self.tokens_per_s + leg.to_compute / window_s,
            self.pairs_per_s + leg.pairs / window_s,
            self.prompts_per_s + 1 / window_s,
        )


NO_PROMPTS = RecentPrompts()


class InstanceTimes(NamedTuple):
    """Times at one instance at one moment.

    Attributes:
        fixed_s, token_s, pair_s, context_s, request_s: Coefficients of a step.
        fetch_token_s: Time to fetch the KV of one token.
        batch: Number of requests that decode now.
        context_tokens: Tokens of these requests, together.
        all_requests: Number of these requests, of requests whose prompts are still to be computed,
            and of requests that are computed elsewhere and will decode here.
        all_tokens: Tokens of all these requests, together.
        ahead_tokens: Tokens of the prompts that are still to be computed.
        ahead_s: Time that these prompts add to steps.
        beside_s: Time of a step without its prompt tokens.
        under_way_s: Remaining time of the step under way: half of the step on average.
        chunk_tokens: Maximum number of prompt tokens of a step.
        prefill_share: Share of the instance's time that prompts take at their recent rate.
        prompts_per_s: Recent rate of prompts.
        kv_tokens: Number of tokens whose KV the instance has room for; 0 if unknown.
    """

    fixed_s: float
    token_s: float
    pair_s: float
    context_s: float
    request_s: float
    fetch_token_s: float
    batch: int
    context_tokens: float
    all_requests: int
    all_tokens: float
    ahead_tokens: int
    ahead_s: float
    beside_s: float
    under_way_s: float
    chunk_tokens: int
    prefill_share: float
    prompts_per_s: float
    kv_tokens: int

    def leg_s(self, leg: LegLoad) -> float:
        """Return the time that the prompt of ``leg`` adds to the steps that compute it."""
        return self.token_s * leg.to_compute + self.pair_s * leg.pairs

    def first_token_s(self, leg: LegLoad) -> float:
        """Return the time until the prompt of ``leg`` is computed, after the prompts before it."""
        steps = ceil((self.ahead_tokens + leg.to_compute) / self.chunk_tokens)
        own_s = self.leg_s(leg)
        own_s = max(own_s, leg.fetched * self.fetch_token_s - self.fixed_s)
        return self.under_way_s + steps * self.beside_s + self.ahead_s + own_s

    def handover_s(self, prompt_tokens: int, way_s: float = 0.0) -> float:
        """Return the time from the end of a prefill leg elsewhere to the step that continues it.

        Args:
            way_s: Transfer time of its KV from another machine. The fetch overlaps with the
                transfer, layer by layer, so that the slower of both counts.
        """
        return max(prompt_tokens * self.fetch_token_s, way_s) + self.under_way_s

    def step_s_with(self, more_requests: int = 0, more_tokens: float = 0.0) -> float:
        """Return the time of a step that only decodes all requests, and ``more_requests`` more."""
        step_s = self.fixed_s + self.request_s * (self.all_requests + more_requests)
        return step_s + self.context_s * (self.all_tokens + more_tokens)

    def token_s_with(self, more_requests: int = 0, more_tokens: float = 0.0) -> float:
        """Return the time of an output token: that of ``step_s_with`` and of prompts in between."""
        return self.step_s_with(more_requests, more_tokens) / (1 - self.prefill_share)

    def interrupted(self, step_s: float) -> tuple[float, float]:
        """Return the mean time that prompts add to each token, and the time of a token with it.

        Args:
            step_s: Time of a step that only decodes.
        """
        mean_s = step_s * self.prefill_share / (1 - self.prefill_share)
        return mean_s, step_s + mean_s

    def token_s_behind(self, more_requests: int, more_tokens: float, output: float) -> float:
        """Return the time of an output token of a request whose prompt is computed elsewhere.

        Prompts that wait here are computed between its tokens, even if few prompts follow them.

        Args:
            output: Number of output tokens of the request.
        """
        token_s = self.token_s_with(more_requests, more_tokens)
        return max(token_s, token_s * (1 - self.prefill_share) + self.ahead_s / max(1.0, output))

    def added_token_s(self, tokens: float) -> float:
        """Return the time that a request of ``tokens`` tokens adds to each step of the others."""
        return self.request_s + self.context_s * tokens

    def room_s(self, tokens: float, output_tokens: float) -> float:
        """Return the time until ended requests have left room for the KV of ``tokens`` tokens.

        Args:
            output_tokens: Mean output length of the requests there, which decides how long they
                stay.
        """
        missing = self.all_tokens + tokens - self.kv_tokens * (1 - _KV_KEPT_FREE_FRACTION)
        if not self.kv_tokens or missing <= 0 or not self.all_requests:
            return 0.0
        return missing / self.all_tokens * output_tokens * self.token_s_with()


def assumed_coefficients(views: Iterable[InstanceView]) -> tuple[float, ...]:
    """Return the mean learnt coefficients of ``views``, for instances without; 0 if none has one.

    An instance that has never prefilled cannot know the cost of a prompt; its peers can.
    """
    known = (view.report.step_coefficients for view in views if view.report is not None)
    return _means(tuple(one for one in known if one))


@lru_cache(maxsize=64)
def _means(known: tuple[tuple[float, ...], ...]) -> tuple[float, ...]:
    """Return the mean of each coefficient; cached, since requests come more often than reports."""
    columns = zip(*known, strict=True)
    means = []
    for column in columns:
        learnt = [value for value in column if value > 0]
        means.append(sum(learnt) / len(learnt) if learnt else 0.0)
    return tuple(means)


def times_of(
    view: InstanceView,
    output_tokens: float,
    assumed: tuple[float, ...] = (),
    recent: RecentPrompts = NO_PROMPTS,
    coming_requests: int = 0,
    coming_tokens: int = 0,
) -> InstanceTimes:
    """Return the times at ``view``; without learnt step times, all tokens have the prefill speed.

    Args:
        output_tokens: Expected output tokens of any request; requests under way have generated half
            of them on average.
        assumed: Coefficients in place of those that it has not learnt; see
            ``assumed_coefficients``.
        recent: Recent prompts that it was sent.
        coming_requests, coming_tokens: Number and tokens of requests that will decode here and are
            still computed elsewhere.
    """
    fixed_s, token_s, pair_s, context_s, request_s = _step(view, assumed)
    batch = max(0, view.inflight_requests - view.inflight_prefill_requests)
    prompts = max(0, view.inflight_tokens - view.inflight_prefill_tokens)
    num_all = view.inflight_requests + coming_requests
    context_tokens = prompts + batch * output_tokens / 2 if batch else 0.0
    beside_s = fixed_s + request_s * batch + context_s * context_tokens
    chunk_tokens = (
        max(_LEAST_CHUNK_TOKENS, view.step_tokens - batch) if view.step_tokens else 1 << 30
    )
    ahead_tokens = view.inflight_prefill_tokens
    ahead_s = token_s * ahead_tokens + pair_s * view.inflight_prefill_pairs
    under_way_s = beside_s if ahead_tokens or batch else 0.0
    if ahead_tokens:
        under_way_s += min(1.0, chunk_tokens / ahead_tokens) * ahead_s
    return InstanceTimes(
        fixed_s,
        token_s,
        pair_s,
        context_s,
        request_s,
        view.report.fetch_token_s if view.report is not None else 0.0,
        batch,
        context_tokens,
        num_all,
        max(1.0, view.inflight_tokens + coming_tokens + num_all * output_tokens / 2),
        ahead_tokens,
        ahead_s,
        beside_s,
        under_way_s / 2,
        chunk_tokens,
        min(_MOST_PREFILL_SHARE, token_s * recent.tokens_per_s + pair_s * recent.pairs_per_s),
        recent.prompts_per_s,
        view.kv_tokens,
    )


def _step(
    view: InstanceView, assumed: tuple[float, ...]
) -> tuple[float, float, float, float, float]:
    """Return the coefficients of a step: fixed, prompt token, pair, context token and request."""
    report = view.report
    learnt = report.step_coefficients if report is not None else ()
    coefficients = learnt or assumed
    if not coefficients:
        token_s = 1 / view.prefill_tokens_per_s if view.prefill_tokens_per_s > 0 else 1.0
        return (report.step_s if report is not None else 0.0), token_s, 0.0, 0.0, token_s
    fixed_s, token_s, pair_s, context_s, request_s, call_s = _filled(coefficients, assumed)
    if view.placements:
        calls = sum(p.module.num_layers if p.module.heads else 1 for p in view.placements)
        fixed_s += call_s * calls
    return fixed_s, token_s, pair_s, context_s, request_s


@lru_cache(maxsize=1024)
def _filled(coefficients: tuple[float, ...], assumed: tuple[float, ...]) -> tuple[float, ...]:
    """Return ``coefficients``; those of rare kinds of work, 0 or fitted below, from ``assumed``."""
    others = assumed or (0.0,) * len(coefficients)
    return tuple(own if own > 0 else other for own, other in zip(coefficients, others, strict=True))
