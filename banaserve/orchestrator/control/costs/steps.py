"""Times of an engine's steps by the profile, adapted to modules away and to guests."""

from __future__ import annotations

from math import sqrt

from banaserve.orchestrator.control.costs.profile import Profile


class StepCosts:
    """Step times of one engine; the first four attributes change while it runs.

    Attributes:
        slowdown: Factor of all step times; 2 makes every step twice as long (a slow instance).
        guest_share: Time of this device that guests take, as a share of the time of its own steps.
        relief: Share of its own step time that its guests take over concurrently.
        hop_s: Time that remote modules add to every step, in seconds.
        fetch_token_s: Time to fetch the KV of one cached token, in seconds.
        num_layers: Number of layers of the model.
    """

    __slots__ = (
        "_large",
        "_large_from",
        "_prefill",
        "_small",
        "fetch_token_s",
        "guest_share",
        "hop_s",
        "num_layers",
        "relief",
        "slowdown",
    )

    def __init__(self, profile: Profile) -> None:
        prefill, small = profile.prefill, profile.decode_small
        large = profile.decode_large or small
        self._prefill = (prefill.fixed_s, prefill.token_s, prefill.pair_s)
        self._small = (small.fixed_s, small.context_token_s, small.request_s)
        self._large = (large.fixed_s, large.context_token_s, large.request_s)
        self._large_from = profile.decode_large.from_batch if profile.decode_large else 1
        self.fetch_token_s = profile.model.token_bytes / profile.link.bytes_per_s
        self.num_layers = profile.model.num_layers
        self.slowdown = 1.0
        self.guest_share = 0.0
        self.relief = 0.0
        self.hop_s = 0.0

    @property
    def factor(self) -> float:
        """Factor by which the profile's times are multiplied."""
        return self.slowdown * (1 - self.relief) * (1 + self.guest_share)

    def mixed_s(self, tokens: int, pairs: int, batch: int, context: int) -> tuple[float, float]:
        """Return the time of one step and the part of it that grows with its work.

        A step with prompt tokens and decoding requests has one fixed part, the larger of the two.

        Args:
            tokens: Prompt tokens that the step computes.
            pairs: Sum of c (c + 2 h) over all chunks of c tokens after h computed ones.
            batch: Number of requests that decode.
            context: Tokens of these requests, together.
        """
        fixed_s = work_s = 0.0
        if tokens:
            fixed_s = self._prefill[0]
            work_s = tokens * self._prefill[1] + pairs * self._prefill[2]
        if batch:
            fixed, context_s, request_s = self._of(batch)
            fixed_s = max(fixed_s, fixed)
            work_s += context * context_s + batch * request_s
        factor = self.factor
        return factor * (fixed_s + work_s) + self.hop_s, factor * work_s

    def decode_run(self, batch: int, context: int) -> tuple[float, float, float]:
        """Return the first step's time, the increase per later step, and the first step's work."""
        fixed_s, context_s, request_s = self._large if batch >= self._large_from else self._small
        work_s = context * context_s + batch * request_s
        factor = self.slowdown * (1 - self.relief) * (1 + self.guest_share)
        return (
            factor * (fixed_s + work_s) + self.hop_s,
            factor * context_s * batch,
            factor * work_s,
        )

    def coefficients(self, batch: int) -> tuple[float, ...]:
        """Return the coefficients that ``step_time`` learns from steps near ``batch`` requests."""
        fixed_s, context_s, request_s = self._of(batch)
        factor = self.factor
        return (
            factor * max(fixed_s, self._prefill[0]) + self.hop_s,
            factor * self._prefill[1],
            factor * self._prefill[2],
            factor * context_s,
            factor * request_s,
            0.0,
        )

    def _of(self, batch: int) -> tuple[float, float, float]:
        return self._large if batch >= self._large_from else self._small


def run_s(first_s: float, growth_s: float, steps: int) -> float:
    """Return the time of ``steps`` steps, each ``growth_s`` longer than the one before."""
    return steps * first_s + growth_s * steps * (steps - 1) / 2


def steps_within(first_s: float, growth_s: float, elapsed_s: float) -> int:
    """Return how many steps of a run (``run_s``) have begun after ``elapsed_s``; at least one."""
    if growth_s * elapsed_s < 1e-9 * first_s * first_s:
        steps = int(elapsed_s / first_s) + 1
    else:
        b = first_s - growth_s / 2
        steps = int((sqrt(b * b + 2 * growth_s * elapsed_s) - b) / growth_s) + 1
    while steps > 1 and run_s(first_s, growth_s, steps - 1) >= elapsed_s:
        steps -= 1
    while run_s(first_s, growth_s, steps) < elapsed_s:
        steps += 1
    return steps
