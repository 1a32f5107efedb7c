"""Cache salts of tenants: the front door writes them, and the KV connector of an engine reads them.

vLLM puts the ``cache_salt`` of a request into the keys of the request's KV blocks. The name of the
tenant within the salt keeps tenants from finding each other's blocks, and tells the store whose
quota the blocks count for.
"""

from __future__ import annotations

import hashlib
import re
from contextvars import ContextVar
from typing import Any, NamedTuple

tenant: ContextVar[str | None] = ContextVar("tenant", default=None)
"""Name of the API key that the current task serves; set if there are several keys."""
_ACCOUNT_BYTES = 16
# Names are digests of 16 digits, or of 32 if a balancer names the tenant.
_OWNED = re.compile(r"((?:[0-9a-f]{16}){1,2}):(.*)", re.DOTALL)


class TenantSalt(NamedTuple):
    """Cache salt of a request.

    Attributes:
        tenant: Name of the tenant that sent the request; empty if the server has a single key.
        salt: Salt that the client chose; empty for none.
    """

    tenant: str = ""
    salt: str = ""

    @classmethod
    def of(cls, cache_salt: str | None) -> TenantSalt:
        """Read the ``cache_salt`` of a request."""
        owned = _OWNED.fullmatch(cache_salt or "")
        return cls(*owned.groups()) if owned is not None else cls(salt=cache_salt or "")

    def __str__(self) -> str:
        """Return the ``cache_salt`` of a request of a tenant."""
        return f"{self.tenant}:{self.salt}"

    @property
    def account(self) -> bytes:
        """Digest of the tenant that pays for the blocks, or else of the salt; empty without both.

        All blocks of a key count together, whichever salts the key's holder sends.
        """
        payer = f"{self.tenant}:" if self.tenant else self.salt
        if not payer:
            return b""
        return hashlib.blake2b(payer.encode(), digest_size=_ACCOUNT_BYTES).digest()


def own_salt(cache_salt: str | None) -> str | None:
    """Return the salt with the current tenant's name, once; the same salt without a tenant."""
    if (name := tenant.get()) is None:
        return cache_salt
    return str(TenantSalt(name, (cache_salt or "").removeprefix(f"{name}:")))


def own_prompt(prompt: Any) -> None:
    """Put the current tenant's name into the ``cache_salt`` of a prompt; needs a dict for that."""
    if isinstance(prompt, dict) and (salt := own_salt(prompt.get("cache_salt"))) is not None:
        prompt["cache_salt"] = salt
