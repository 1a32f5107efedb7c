"""Check of a name that a user gives against the known names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

from banaserve.base.errors import UserError

_NONE_REFUSED: Mapping[str, str] = MappingProxyType({})


def check_known(
    what: str, given: str, known: Iterable[str], refused: Mapping[str, str] = _NONE_REFUSED
) -> None:
    """Check that ``given`` is one of ``known``.

    Args:
        what: Kind of name, for the message.
        refused: Reasons by name, for names whose registration was refused.

    Raises:
        UserError: ``given`` is unknown; the message lists the known names, and gives the reason of
            the refusal or the nearest known name.
    """
    known = sorted(known)
    if given in known:
        return
    listed = f"unknown {what}: {given} (known: {', '.join(known) or 'none'})"
    if given in refused:
        raise UserError(f"{listed}; {refused[given]}")
    begun = [one for one in known if given and one.startswith(given)]
    nearest = begun or get_close_matches(given, known, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    raise UserError(f"{listed}{hint}")
