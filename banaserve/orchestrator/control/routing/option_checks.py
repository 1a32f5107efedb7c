"""Checks of routing policies' options, which the command line gives as text or numbers."""

from __future__ import annotations

from math import inf

from banaserve.base.errors import UserError


def check_number(name: str, value: object, at_most: float = inf) -> None:
    """Check that ``value`` is a number above 0 and at most ``at_most``.

    Raises:
        UserError: ``value`` is something else.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= at_most:  # type: ignore[operator]  # nan fails too
        wanted = "more than 0" if at_most == inf else f"a load above 0 and at most {at_most:g}"
        raise UserError(f"{name} is {value}: give {wanted}")
