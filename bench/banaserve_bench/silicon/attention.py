"""Measured times of one layer's attention: of a prefill chunk, of decoding requests, of both.

Mixed steps have measurements of their own: for Llama-3.1-8B on RTX PRO 6000 they take 1.2 times the
sum of their parts in the median of the measured points, and more than twice in a tenth of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from banaserve_bench.silicon.interpolation import Buckets, Grid

Contexts = Callable[[], tuple[int, int, int]]
"""Function that returns the least and largest context of decoding requests, and their sum."""


class AttentionRow(NamedTuple):
    """Measured time of one layer's attention, in seconds; 0 tokens or requests for none."""

    chunk_tokens: int
    computed_tokens: int
    requests: int
    context_tokens: int
    time_s: float


class AttentionTable:
    """Times of one layer's attention, interpolated between the measured points.

    Args:
        alphas: Place of a step with unequal contexts between those whose contexts are all the mean
            (0) and all the largest (1); by prompt tokens, requests, place of the mean between the
            least and the largest context, the largest context, and computed tokens. None to take
            all contexts as equal.

    Raises:
        ValueError: There is no row of steps that only prefill, that only decode, or that do both.
    """

    def __init__(self, rows: Iterable[AttentionRow], alphas: Buckets | None = None) -> None:
        prefill: list[tuple[float, ...]] = []
        decode: list[tuple[float, ...]] = []
        mixed: list[tuple[float, ...]] = []
        for row in rows:
            chunk, computed, requests, context, time_s = row
            if not chunk:
                decode.append((requests, context, time_s))
            elif not requests:
                prefill.append((chunk, computed, time_s))
            else:
                mixed.append((chunk, computed, requests, context, time_s))
        if not decode or not prefill or not mixed:
            raise ValueError("attention needs rows of prefill, of decode and of both at once")
        self._prefill, self._decode, self._mixed = Grid(prefill), Grid(decode), Grid(mixed)
        self._alphas = alphas

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the time of one layer in a step; arguments as in ``GpuStepTimes.step_s``."""
        equal_s = self._equal_s(tokens, pairs, batch, context)
        if self._alphas is None or contexts is None or batch < 2:
            return equal_s
        least, most, total = contexts()
        if least == most:
            return equal_s
        place = (total / batch - least) / (most - least)
        computed = max(0.0, (pairs / tokens - tokens) / 2) if tokens else 0.0
        alpha = self._alphas(tokens, batch, place, most, computed)
        # ``context`` may be that of a later step, by then all contexts have grown alike.
        largest_s = self._equal_s(tokens, pairs, batch, context + batch * most - total)
        return equal_s + alpha * (largest_s - equal_s)

    def _equal_s(self, tokens: int, pairs: int, batch: int, context: int) -> float:
        if not tokens:
            return self._decode(batch, context / batch)
        computed = (pairs / tokens - tokens) / 2
        saved_s = 0.0
        if computed < 0:
            # Several prompts at once compute fewer pairs than one chunk of all tokens does.
            each, computed = pairs / tokens, 0.0
            apart_s = tokens / each * self._prefill(each, 0)
            saved_s = max(0.0, self._prefill(tokens, 0) - apart_s)
        if not batch:
            return self._prefill(tokens, computed) - saved_s
        return self._mixed(tokens, computed, batch, context / batch) - saved_s
