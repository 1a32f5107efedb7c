"""API keys: everything but the probes needs one where any is set; each key is a tenant."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.api.edge.authenticated import mark_authenticated
from banaserve.api.edge.refusals import refuse
from banaserve.engine.vllm.client import tenant

OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})


class KeyMiddleware:
    """Refuses requests without a known ``Authorization: Bearer`` key.

    With more than one key, the KV caches of their holders are kept apart: a prefix that one has
    sent is no faster for another, so timing tells no client about the keys of others.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_guarded = _is_guarded(scope)
        if not self._digests or not is_guarded:
            if is_guarded:
                mark_authenticated(scope)
            await self._app(scope, receive, send)
            return
        digest = self._known(Headers(scope=scope).get("authorization", ""))
        if digest is None:
            refusal = refuse(
                "key",
                HTTPStatus.UNAUTHORIZED,
                "no valid API key: send the header 'Authorization: Bearer KEY'",
                {"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        mark_authenticated(scope)
        if len(self._digests) > 1:
            tenant.set(digest.hex()[:16])
        await self._app(scope, receive, send)

    def _known(self, header: str) -> bytes | None:
        scheme, _, key = header.partition(" ")
        given = _digest(key)
        found = None
        for digest in self._digests:
            if secrets.compare_digest(given, digest):
                found = digest
        return found if scheme.lower() == "bearer" else None


def _is_guarded(scope: Scope) -> bool:
    if scope["type"] not in ("http", "websocket") or scope.get("method") == "OPTIONS":
        return False
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return path.rstrip("/") not in OPEN_PATHS


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
