"""API keys: if any is set, all paths but the probes need one; each key is a tenant."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus
from time import monotonic

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.access.cache_salt import tenant
from banaserve.base.access.tenants import (
    TENANT_FIELD,
    OverLimit,
    Quota,
    TenantKey,
    TenantTerms,
    is_tenant_name,
    tenant_terms,
)
from banaserve.frontdoor.edge.edge import mark_authenticated, path_of
from banaserve.frontdoor.edge.refusals import note, refuse

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})
"""Paths that need no key to be read."""
_TENANT_FIELD = TENANT_FIELD.lower().encode()


class _Holder:
    """Holder of a key: the key's digest, its limits and its use of them."""

    def __init__(self, key: TenantKey) -> None:
        self.digest = digest_of(key.key)
        self.is_balancer = key.is_balancer
        self.quota = Quota(key, monotonic())
        self.terms = TenantTerms(self._use_tokens, key.priority, self._refuse_session)

    def _use_tokens(self, num_tokens: int) -> None:
        self.quota.spend_tokens(num_tokens, monotonic())

    def _refuse_session(self) -> str:
        if (over := self.quota.excess_of_tokens(monotonic())) is None:
            return ""
        note(over.limit, HTTPStatus.TOO_MANY_REQUESTS, str(over))
        return str(over)


class KeyMiddleware:
    """Middleware that refuses requests without a known ``Authorization: Bearer`` key or over quota.

    With more than one key, the KV caches of their holders are isolated: a prefix that one holder
    has sent is not faster for another, so timing reveals nothing about other holders' prompts. Only
    the holder of a balancer's key may name the tenant that a request is for.

    Args:
        metrics_key: Key for ``/metrics``, which then also accepts clients' keys; empty if
            ``/metrics`` needs no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[TenantKey], metrics_key: str = "") -> None:
        self._app = app
        self._holders = [_Holder(key) for key in keys]
        self._metrics_digest = digest_of(metrics_key) if metrics_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_metrics = scope["type"] == "http" and f"{path_of(scope)}/".startswith("/metrics/")
        if self._metrics_digest is not None and is_metrics:
            await self._answer_metrics(self._metrics_digest, scope, receive, send)
            return
        is_guarded = _is_guarded(scope)
        if not self._holders or not is_guarded:
            if is_guarded:
                mark_authenticated(scope)
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        holder = self._known(_given(headers))
        named = headers.get(TENANT_FIELD, "")
        if holder is None:
            refusal = refuse(
                "key",
                HTTPStatus.UNAUTHORIZED,
                "no valid API key: send the header 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        mark_authenticated(scope)
        if holder.is_balancer and named and not is_tenant_name(named):
            await _answer_odd_tenant()(scope, receive, send)
            return
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != _TENANT_FIELD]
        if (over := holder.quota.begin(monotonic())) is not None:
            await _answer_over(over)(scope, receive, send)
            return
        if holder.is_balancer and named:
            tenant.set(named)
        elif len(self._holders) > 1:
            tenant.set(holder.digest.hex()[:16])
        tenant_terms.set(holder.terms)
        try:
            await self._app(scope, receive, send)
        finally:
            holder.quota.end()

    async def _answer_metrics(
        self, digest: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        given = _given(Headers(scope=scope))
        if secrets.compare_digest(given, digest) or self._known(given) is not None:
            await self._app(scope, receive, send)
            return
        refusal = refuse(
            "metrics_key",
            HTTPStatus.UNAUTHORIZED,
            "metrics need a key: send the header 'Authorization: Bearer KEY' with --metrics-key",
            {"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

    def _known(self, given: bytes) -> _Holder | None:
        found = None
        for holder in self._holders:
            if secrets.compare_digest(given, holder.digest):
                found = holder
        return found


def _answer_over(over: OverLimit) -> Response:
    headers = {"Retry-After": str(over.retry_after_s)}
    return refuse(over.limit, HTTPStatus.TOO_MANY_REQUESTS, str(over), headers)


def _answer_odd_tenant() -> Response:
    why = f"{TENANT_FIELD} is no tenant's name: update the balancer"
    return refuse("tenant", HTTPStatus.BAD_REQUEST, why)


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return False
    # The body of any other method would be kept and parsed, at whatever path.
    is_read = scope.get("method") in ("GET", "HEAD")
    return not is_read or path_of(scope).rstrip("/") not in OPEN_PATHS


def given_key(headers: Headers) -> str:
    """Return the key that a request shows in its ``Authorization`` field; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _given(headers: Headers) -> bytes:
    """Return the digest of the key that a request shows; empty, as no key's is, without one."""
    key = given_key(headers)
    return digest_of(key) if key else b""


def digest_of(secret: str) -> bytes:
    """Return the digest by which a key is kept and compared, as 32 bytes."""
    return hashlib.sha256(secret.encode()).digest()
