"""Latency limits (SLOs) that a request gives in its headers."""

from __future__ import annotations

from http import HTTPStatus
from math import isfinite

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.errors import UserError
from banaserve.base.types import RequestLimits
from banaserve.frontdoor.edge.refusals import refuse
from banaserve.serving.client import request_limits

TTFT_HEADER = "X-Banaserve-SLO-TTFT"
TPOT_HEADER = "X-Banaserve-SLO-TPOT"
_NAMES = frozenset(name.lower().encode() for name in (TTFT_HEADER, TPOT_HEADER))


class RequestLimitsReader:
    """Middleware that keeps a request's limits for its routing; answers 400 to wrong values.

    Args:
        dilation: Wall seconds of the server for one second in a request's limits.
    """

    def __init__(self, app: ASGIApp, dilation: float = 1.0) -> None:
        self._app = app
        self._dilation = dilation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _names_any(scope):
            await self._app(scope, receive, send)
            return
        try:
            limits = limits_of(Headers(scope=scope), self._dilation)
        except UserError as wrong:
            await refuse("slo", HTTPStatus.BAD_REQUEST, str(wrong))(scope, receive, send)
            return
        before = request_limits.set(limits)
        try:
            await self._app(scope, receive, send)
        finally:
            request_limits.reset(before)


def _names_any(scope: Scope) -> bool:
    """Return whether a request has one of the headers, which is rare."""
    return any(name in _NAMES for name, _ in scope["headers"])


def limits_of(headers: Headers, dilation: float = 1.0) -> RequestLimits:
    """Return the limits in ``headers``, in the server's seconds; 0: the request has no limit.

    Raises:
        UserError: A value is no number of seconds.
    """
    found = (_seconds(headers, name) for name in (TTFT_HEADER, TPOT_HEADER))
    return RequestLimits(*(None if one is None else one * dilation for one in found))


def _seconds(headers: Headers, name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not isfinite(seconds) or seconds < 0:
        raise UserError(f"{name} is {text[:40]!r}: give seconds, 0 or more")
    return seconds
