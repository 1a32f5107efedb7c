"""Mark of connections whose client has shown a valid key."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

_KEY = "banaserve.authenticated"


def offer_mark(scope: Scope, mark: Callable[[], None]) -> None:
    """Store ``mark`` in ``scope``, for the middleware that checks the request's key to call."""
    scope[_KEY] = mark


def mark_authenticated(scope: Scope) -> None:
    """Call the mark in ``scope``: the request has shown a valid key, or needs none."""
    mark = scope.get(_KEY)
    if mark is not None:
        mark()
