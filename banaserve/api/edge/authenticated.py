"""Mark of connections whose client has shown a valid key."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

_KEY = "banaserve.authenticated"


def offer_mark(scope: Scope, mark: Callable[[], None]) -> None:
    """Let whoever checks the key of the request in ``scope`` call ``mark``."""
    scope[_KEY] = mark


def mark_authenticated(scope: Scope) -> None:
    """The request in ``scope`` has shown a valid key, or needs none."""
    mark = scope.get(_KEY)
    if mark is not None:
        mark()
