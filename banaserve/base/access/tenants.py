"""Tenants of ``serve``: holders of API keys, with their limits, from a TOML file."""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import msgspec

from banaserve.base.access.quotas import KeyLimits
from banaserve.base.errors import UserError

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
