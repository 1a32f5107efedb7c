"""Options of the form KEY=VALUE."""

from __future__ import annotations

import contextlib

from banaserve.errors import UserError


def read_pair(option: str, text: str) -> tuple[str, str | int | float]:
    """Returns key and value of ``text``; a value that is a number is one.

    Args:
        option: As typed, for the message.

    Raises:
        UserError: ``text`` is no pair.
    """
    key, equals, word = text.partition("=")
    if not equals:
        raise UserError(f"{option} {text}: write KEY=VALUE")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return key.replace("-", "_"), kind(word)
    return key.replace("-", "_"), word
