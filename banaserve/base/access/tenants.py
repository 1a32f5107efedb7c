"""Tenants of ``serve``: holders of API keys, their limits from a TOML file, and their use of these.

Callers of ``Quota`` pass the time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import msgspec

from banaserve.base.errors import UserError

_MINUTE_S = 60.0


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of one API key; 0 for no limit.

    Attributes:
        max_requests: Maximum number of requests under way.
        requests_per_minute: Maximum requests per minute; an idle key may send all of them at once.
        tokens_per_minute: Maximum tokens of prompts and answers per minute, counted once known:
            the request that exceeds it is served, later requests are refused until it recovers.
    """

    max_requests: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0

    def check(self) -> None:
        """Check that every limit is valid.

        Raises:
            UserError: A limit is negative.
        """
        for name in KeyLimits.__struct_fields__:
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}: give 0 (no limit) or more")


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Excess of a request over a limit.

    Attributes:
        most: Value of the limit.
        retry_after_s: Earliest time at which a retry may be within the limit, in seconds from now.
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
        num_requests: Number of requests under way.
    """

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self._limits = limits
        self.num_requests = 0
        self._requests = _Allowance(limits.requests_per_minute, now_s)
        self._tokens = _Allowance(limits.tokens_per_minute, now_s)

    def take_limits(self, limits: KeyLimits, now_s: float) -> None:
        """Replace the limits; requests under way still count."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _Allowance(limits.requests_per_minute, now_s)
            self._tokens = _Allowance(limits.tokens_per_minute, now_s)

    def excess(self, now_s: float) -> OverLimit | None:
        """Return the limit that one more request would exceed; None if it would exceed none."""
        limits = self._limits
        if 0 < limits.max_requests <= self.num_requests:
            return OverLimit("max_requests", limits.max_requests, 1)
        if (wait_s := self._requests.wait_s(1.0, now_s)) > 0:
            return OverLimit("requests_per_minute", limits.requests_per_minute, ceil(wait_s))
        return self.excess_of_tokens(now_s)

    def excess_of_tokens(self, now_s: float) -> OverLimit | None:
        """Return the limit of tokens if it is used up, else None."""
        if (wait_s := self._tokens.wait_s(0.0, now_s)) > 0:
            return OverLimit("tokens_per_minute", self._limits.tokens_per_minute, ceil(wait_s))
        return None

    def begin(self, now_s: float) -> OverLimit | None:
        """Count one more request as under way; if it exceeds a limit, return that limit instead."""
        if (over := self.excess(now_s)) is not None:
            return over
        self.num_requests += 1
        self._requests.spend(1, now_s)
        return None

    def end(self) -> None:
        """Count a request as ended."""
        self.num_requests -= 1

    def spend_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or of an answer."""
        self._tokens.spend(num_tokens, now_s)


class _Allowance:
    """A minute's allowance that is refilled at an even rate and may become negative.

    Args:
        per_minute: Allowance per minute; 0 for no limit.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """Return the seconds until ``needed`` (if 0, any amount) is left; 0 if it is left now."""
        if not self._per_minute:
            return 0.0
        self._refill(now_s)
        missing = needed - self._left if needed else -self._left
        if missing < 0 or (needed and missing == 0):
            return 0.0
        # For tokens (needed is 0) until at least one is left, so that the wait is longer than 0.
        return max(missing, 1.0 - needed) * _MINUTE_S / self._per_minute

    def spend(self, amount: float, now_s: float) -> None:
        if self._per_minute:
            self._refill(now_s)
            self._left -= amount

    def _refill(self, now_s: float) -> None:
        came = max(0.0, now_s - self._at_s) * self._per_minute / _MINUTE_S
        self._left = min(float(self._per_minute), self._left + came)
        self._at_s = now_s


TENANT_FIELD = "X-Banaserve-Tenant"
"""Header in which a balancer names the tenant of a request."""
_NAME = re.compile(r"[0-9a-f]{32}")
_MAX_FILE_BYTES = 4 * 2**20


class TenantKey(KeyLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An API key of ``serve``.

    Attributes:
        key: Secret that the key's holder sends.
        priority: Priority of the key's requests in vLLM's scheduler, lower first; None: that of
            each request.
        is_balancer: True if the key's holder is a balancer, which names the tenant of each request.
    """

    key: str
    priority: int | None = None
    is_balancer: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: tuple[TenantKey, ...]


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """Terms of the API key of a request.

    Attributes:
        use_tokens: Called with the number of tokens of the request's prompt, then of its answer.
        priority: Priority in vLLM's scheduler, lower first; None: that of the request.
        refuse_session: Returns the reason why a session of this key must end; empty if it may go
            on. A session may last longer than a minute, so refusing later requests is not enough.
    """

    use_tokens: Callable[[int], None]
    priority: int | None = None
    refuse_session: Callable[[], str] = str


tenant_terms: ContextVar[TenantTerms | None] = ContextVar("tenant_terms", default=None)
"""Terms of the key that the current task serves; None without a key."""


def read_tenants(path: Path) -> tuple[TenantKey, ...]:
    """Return the tenants of a TOML file: ``[[tenants]]`` tables of ``TenantKey``.

    Raises:
        UserError: The file cannot be read, or a value in it is not valid.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"--tenants {path}: larger than {_MAX_FILE_BYTES} bytes")
        found = msgspec.convert(tomllib.loads(path.read_text()), _File).tenants
    except OSError as error:
        raise UserError(f"--tenants {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UserError(f"--tenants {path}: {' '.join(str(error).split())}") from None
    for number, one in enumerate(found, start=1):
        try:
            one.check()
        except UserError as error:
            raise UserError(f"--tenants {path}, tenant {number}: {error}") from None
    return found


def tenant_name(secret: str, identity: str) -> str:
    """Return a tenant's name that only holders of ``secret`` can make: 32 hex digits.

    Args:
        identity: Identity of the tenant: its key, or a name that this function has returned.
    """
    return hmac.new(secret.encode(), identity.encode("latin-1"), hashlib.sha256).hexdigest()[:32]


def is_tenant_name(text: str) -> bool:
    """Return whether ``text`` has the form of a name from ``tenant_name``."""
    return _NAME.fullmatch(text) is not None
