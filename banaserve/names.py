"""Refusing a name that nobody knows, in words that help."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from banaserve.errors import UserError


def check_known(what: str, given: str, known: Iterable[str]) -> None:
    """Returns if ``given`` is one of ``known``.

    Raises:
        UserError: It is not; lists the known ones and names the nearest.
    """
    known = sorted(known)
    if given in known:
        return
    nearest = get_close_matches(given, known, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise UserError(f"unknown {what}: {given} (known: {', '.join(known) or 'none'}){hint}")
