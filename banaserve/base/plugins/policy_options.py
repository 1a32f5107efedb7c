"""Policies and their options, made of a section of the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from banaserve.base.errors import UserError, one_line
from banaserve.base.plugins.registry import OWN
from banaserve.base.text.names import check_known

T = TypeVar("T")
_TAKES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""Option types that values are checked against, with their descriptions in messages."""


def build_options(
    owner: str,
    options: Any,
    build: Callable[..., T],
    section: Mapping[str, Any],
    package: str = OWN,
) -> T:
    """Return ``build(**section)``: the options of one policy from its section of a configuration.

    Each value must have the type of its field, if that is int, float, str or bool, or a union of
    these and None. For a str field a number is converted to text, and for a bool field the words
    ``true`` and ``false`` are converted to bool: a command line cannot distinguish these types.

    Args:
        owner: Name of the policy that the options belong to, for messages.
        options: Dataclass of the options, or an instance of it.
        package: Package of the policy.

    Raises:
        UserError: An option is unknown, or a value has another type or is out of range.
    """
    known = option_names(options)
    for option in section:
        check_known(f"option of {owner}", option, known)
    types = option_types(options)
    given = {
        option: _typed(owner, option, value, types.get(option, ()))
        for option, value in section.items()
    }
    name = f"options of {_of(owner, package)}"
    with _naming(name, package):
        try:
            return build(**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: {error}") from error


def build_policy(owner: str, package: str, build: Callable[..., T], *arguments: Any) -> T:
    """Return ``build(*arguments)``: a policy with its options.

    Raises:
        UserError: A policy of another package cannot be built; the message names the package.
    """
    with _naming(_of(owner, package), package):
        return build(*arguments)


@contextlib.contextmanager
def _naming(name: str, package: str) -> Iterator[None]:
    """Let errors of another package's code become errors of the user, which name its policy."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if package == OWN:
            raise
        raise UserError(f"{name}: {one_line(error)}") from error


def _of(owner: str, package: str) -> str:
    return owner if package == OWN else f"{owner} of {package}"


def _typed(owner: str, option: str, value: Any, types: Sequence[type]) -> Any:
    """Return ``value`` converted to one of ``types``; unchanged if ``types`` is empty."""
    is_taken = type(value) in types or (type(value) is int and float in types)
    if not types or (is_taken and value == value):  # nan is no number
        return value
    if bool in types and value in ("true", "false"):
        return value == "true"
    if str in types and type(value) in (int, float):
        return str(value)
    takes = " or ".join(_TAKES[one] for one in types if one is not NoneType)
    raise UserError(f"{owner}: {option} takes {takes}: got {value!r}")


def option_names(options: Any) -> list[str]:
    """Return the names of the fields of a dataclass or of an instance of one."""
    return [field.name for field in fields(options)]


def option_types(options: Any) -> dict[str, tuple[type, ...]]:
    """Return the accepted types of each option, without options of unsupported types."""
    try:
        hints = get_type_hints(options if isinstance(options, type) else type(options))
    except Exception:  # an annotation may use a name that is not imported at run time
        return {}
    found = {}
    for name in option_names(options):
        hint = hints[name]
        types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if any(one in _TAKES for one in types) and all(
            one in _TAKES or one is NoneType for one in types
        ):
            found[name] = types
    return found
