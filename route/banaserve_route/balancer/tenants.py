"""Tenants of a balancer, identified by the keys that requests show, and their quotas."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from time import monotonic

from banaserve.base.access.tenants import (
    TENANT_FIELD,
    KeyLimits,
    OverLimit,
    Quota,
    is_tenant_name,
    tenant_name,
)
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.request import ClientRequest

_FIELD = TENANT_FIELD.lower().encode()


class TenantUse:
    """Tenant, the holder of one key, with its quota.

    Attributes:
        identity: Name of the tenant among balancers, which reveals nothing of its key.
    """

    __slots__ = ("identity", "quota")

    def __init__(self, identity: str, quota: Quota) -> None:
        self.identity = identity
        self.quota = quota


class TenantQuotas:
    """Tenants that hold the keys that clients may show.

    Args:
        on_refused: Called for each request beyond a limit.
    """

    def __init__(self, on_refused: Callable[[OverLimit], None]) -> None:
        self._on_refused = on_refused
        self._by_digest: dict[bytes, TenantUse] = {}

    def take_settings(self, settings: BalancerSettings) -> None:
        """Apply the keys and limits of ``settings``; the past use of a known key still counts."""
        limits: dict[str, KeyLimits] = dict.fromkeys(settings.api_keys, KeyLimits())
        limits |= {one.key: one.limits for one in settings.tenants}
        before, self._by_digest, now_s = self._by_digest, {}, monotonic()
        for key, wanted in limits.items():
            digest = _digest(key.encode())
            known = before.get(digest)
            if known is None:
                # Derived from the key that balancers share: the same name in every region.
                identity = tenant_name(settings.peer_key, key)
                known = TenantUse(identity, Quota(wanted, now_s))
            known.quota.take_limits(wanted, now_s)
            self._by_digest[digest] = known

    def of(self, message: ClientRequest) -> TenantUse | None:
        """Return the tenant whose key ``message`` shows; None if the key is unknown."""
        if not self._by_digest:
            return None
        key = message.seen.get(b"authorization", b"").partition(b" ")[2].strip()
        return self._by_digest.get(_digest(key)) if key else None

    def excess(self, message: ClientRequest) -> OverLimit | None:
        """Return the limit that ``message`` would exceed, if any."""
        tenant = self.of(message)
        return self._told(tenant.quota.excess(monotonic())) if tenant is not None else None

    def begin(self, tenant: TenantUse) -> OverLimit | None:
        """Count a request of ``tenant`` as under way, or return the limit that it would exceed."""
        return self._told(tenant.quota.begin(monotonic()))

    def _told(self, over: OverLimit | None) -> OverLimit | None:
        if over is not None:
            self._on_refused(over)
        return over


def forwarded_identity(message: ClientRequest) -> str:
    """Return the tenant for which another balancer asks; empty if it names none."""
    named = message.seen.get(_FIELD, b"").decode("latin-1")
    return named if is_tenant_name(named) else ""


def tenant_field(identity: str, replica_key: str) -> bytes:
    """Return the header line that names the tenant of a request to a target.

    Args:
        replica_key: Key that is shown to the replica; empty for another balancer.
    """
    name = tenant_name(replica_key, identity) if replica_key else identity
    return f"{TENANT_FIELD}: {name}\r\n".encode()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
