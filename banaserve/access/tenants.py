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

from banaserve.access.quotas import KeyLimits
from banaserve.errors import UserError

TENANT_FIELD = "X-Banaserve-Tenant"
"""Header in which a balancer names the tenant that it asks for."""
_NAME = re.compile(r"[0-9a-f]{32}")
_MAX_FILE_BYTES = 4 * 2**20


class TenantKey(KeyLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One API key of ``serve``.

    Attributes:
        key: What its holder shows.
        priority: Of its requests in vLLM's scheduler, lower first; None leaves it to requests.
        is_balancer: Its holder is a balancer, which says for whom it asks.
    """

    key: str
    priority: int | None = None
    is_balancer: bool = False


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: tuple[TenantKey, ...]


@dataclass(frozen=True, slots=True)
class TenantTerms:
    """Terms of the API key that a request has come with.

    Attributes:
        use_tokens: Told how many tokens its prompt has, then its answer.
        priority: In vLLM's scheduler, lower first; None: what the request says.
        refuse_session: Why a session of this key does not go on; empty where it does. A session
            lasts longer than a minute, so the requests behind it are not enough to wait.
    """

    use_tokens: Callable[[int], None]
    priority: int | None = None
    refuse_session: Callable[[], str] = str


tenant_terms: ContextVar[TenantTerms | None] = ContextVar("tenant_terms", default=None)
"""Terms of the key that the current task serves; None where there is no key."""


def read_tenants(path: Path) -> tuple[TenantKey, ...]:
    """Returns the tenants of a TOML file: ``[[tenants]]`` tables of ``TenantKey``.

    Raises:
        UserError: It cannot be read, or something in it makes no sense.
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
    """Returns the name of a tenant that only holders of ``secret`` can make: 32 hex digits.

    Args:
        identity: Of the tenant: its key, or a name of this kind.
    """
    return hmac.new(secret.encode(), identity.encode("latin-1"), hashlib.sha256).hexdigest()[:32]


def is_tenant_name(text: str) -> bool:
    """Whether ``text`` may be what ``tenant_name`` has made."""
    return _NAME.fullmatch(text) is not None
