"""Quotas of API keys: requests at once, and requests and tokens a minute. Pure.

Callers say the time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import msgspec

from banaserve.errors import UserError

_MINUTE_S = 60.0


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one API key; 0: none.

    Attributes:
        max_requests: Under way at once.
        requests_per_minute: A key that has been idle may send a minute's at once.
        tokens_per_minute: Of prompts and answers, counted when they are known: the request that
            goes beyond is served, and the next ones wait.
    """

    max_requests: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def check(self) -> None:
        """Return if every limit makes sense.

        Raises:
            UserError: One is negative.
        """
        for name in KeyLimits.__struct_fields__:
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 (no limit) or more")


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A request is beyond a limit.

    Attributes:
        limit: Name of the limit.
        retry_after_s: When it may be within it again, at the earliest.
    """

    limit: str
    most: int
    retry_after_s: int

    def __str__(self) -> str:
        what = self.limit.removeprefix("max_").replace("_", " ")
        once = " at once" if self.limit == "max_requests" else ""
        return (
            f"this API key may have {self.most} {what}{once}: try again in {self.retry_after_s} s"
        )


class Quota:
    """Use of one API key against its limits.

    Attributes:
        num_requests: Under way.
    """

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self._limits = limits
        self.num_requests = 0
        self._requests = _Allowance(limits.requests_per_minute, now_s)
        self._tokens = _Allowance(limits.tokens_per_minute, now_s)

    def take_limits(self, limits: KeyLimits, now_s: float) -> None:
        """Let these hold; what is under way still counts."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _Allowance(limits.requests_per_minute, now_s)
            self._tokens = _Allowance(limits.tokens_per_minute, now_s)

    def excess(self, now_s: float) -> OverLimit | None:
        """The limit that one more request would be beyond; None where there is none."""
        limits = self._limits
        if 0 < limits.max_requests <= self.num_requests:
            return OverLimit("max_requests", limits.max_requests, 1)
        if (wait_s := self._requests.wait_s(1.0, now_s)) > 0:
            return OverLimit("requests_per_minute", limits.requests_per_minute, ceil(wait_s))
        return self.excess_of_tokens(now_s)

    def excess_of_tokens(self, now_s: float) -> OverLimit | None:
        """The limit of tokens, where more than it has been used."""
        if (wait_s := self._tokens.wait_s(0.0, now_s)) > 0:
            return OverLimit("tokens_per_minute", self._limits.tokens_per_minute, ceil(wait_s))
        return None

    def begin(self, now_s: float) -> OverLimit | None:
        """Count one more request as under way, unless it is beyond a limit."""
        if (over := self.excess(now_s)) is not None:
            return over
        self.num_requests += 1
        self._requests.spend(1, now_s)
        return None

    def end(self) -> None:
        """One that has begun has ended."""
        self.num_requests -= 1

    def spend_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or of an answer."""
        self._tokens.spend(num_tokens, now_s)


class _Allowance:
    """A minute's allowance that comes back evenly; what is spent may go below nothing.

    Args:
        per_minute: 0: without a limit.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Seconds until more than nothing, and ``needed``, are left; 0 where they are."""
        if not self._per_minute:
            return 0.0
        self._refill(now_s)
        missing = needed - self._left if needed else -self._left
        if missing < 0 or (needed and missing == 0):
            return 0.0
        # Of tokens at least one, so that the wait is not over before it has begun.
        return max(missing, 1.0 - needed) * _MINUTE_S / self._per_minute

    def spend(self, amount: float, now_s: float) -> None:
        if self._per_minute:
            self._refill(now_s)
            self._left -= amount

    def _refill(self, now_s: float) -> None:
        came = max(0.0, now_s - self._at_s) * self._per_minute / _MINUTE_S
        self._left = min(float(self._per_minute), self._left + came)
        self._at_s = now_s
