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

    Args:
        metrics_key: Opens ``/metrics``, as the keys of clients do then; empty where that is open.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], metrics_key: str = "") -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._metrics_digest = _digest(metrics_key) if metrics_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._metrics_digest is not None and _is_metrics(scope):
            await self._answer_metrics(self._metrics_digest, scope, receive, send)
            return
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

    async def _answer_metrics(
        self, digest: bytes, scope: Scope, receive: Receive, send: Send
    ) -> None:
        header = Headers(scope=scope).get("authorization", "")
        if _is_key(header, digest) or self._known(header) is not None:
            await self._app(scope, receive, send)
            return
        refusal = error_response(
            HTTPStatus.UNAUTHORIZED,
            "metrics need a key: send the header 'Authorization: Bearer KEY' with --metrics-key",
            {"WWW-Authenticate": "Bearer"},
        )
        await refusal(scope, receive, send)

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


def _is_metrics(scope: Scope) -> bool:
    """Also what vLLM's own page of metrics answers, which is mounted below that path."""
    if scope["type"] != "http":
        return False
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == "/metrics" or path.startswith("/metrics/")


def _is_key(header: str, digest: bytes) -> bool:
    scheme, _, key = header.partition(" ")
    return secrets.compare_digest(_digest(key), digest) and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
