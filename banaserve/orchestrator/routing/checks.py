"""Checks of routing policies' options, which come from the command line as words or numbers."""

from __future__ import annotations

from math import inf

from banaserve.errors import UserError


def check_number(name: str, value: object, at_most: float = inf) -> None:
    """Returns if ``value`` is a number above 0.

    Raises:
        UserError: It is not, or is more than ``at_most``.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value <= at_most:  # type: ignore[operator]  # nan fails too
        wanted = "more than 0" if at_most == inf else f"a load above 0 and at most {at_most:g}"
        raise UserError(f"{name} is {value}: give {wanted}")
