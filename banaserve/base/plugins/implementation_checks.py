"""Checks of classes that other packages offer as implementations of an interface."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

from banaserve.base.errors import UserError
from banaserve.base.plugins.registry import OWN


def check_class(found: object, interface: type, arguments: Sequence[str] | None = None) -> Any:
    """Return ``found`` after checking that it is a class with the methods of ``interface``.

    A method that overrides one of a banaserve class must accept the same arguments, too.

    Args:
        interface: Protocol or base class: each of its public methods is required, with the same
            arguments.
        arguments: Constructor arguments of the class, in order; None skips their check.

    Raises:
        UserError: ``found`` is no such class; the message names what is missing or differs.
    """
    if not isinstance(found, type):
        kind, name = type(found).__name__, getattr(found, "__qualname__", "")
        raise UserError(f"it refers to a {kind}{f' ({name})' if name else ''}, which is no class")
    wanted = {name: one for name, one in _methods(interface).items() if not name.startswith("_")}
    have = dict(inspect.getmembers(found))
    missing = [name for name in wanted if name not in have]
    missing += [name for name, one in have.items() if getattr(one, "__isabstractmethod__", False)]
    if missing:
        raise UserError(f"{found.__name__} lacks {', '.join(sorted(missing))}")
    for name, member in {**_overridden(found, interface), **wanted}.items():
        _check_override(found, name, member)
    if arguments is not None:
        check_call(found, found.__name__, arguments)
    return found


def _methods(owner: type) -> dict[str, FunctionType]:
    """Return the methods of a class, without inherited and special (``__x__``) methods."""
    return {
        name: member
        for name, member in vars(owner).items()
        if inspect.isfunction(member) and not name.startswith("__")
    }


def _overridden(found: type, interface: type) -> dict[str, FunctionType]:
    """Return the methods that a class overrides, of banaserve's and the interface's package."""
    ours = {OWN, interface.__module__.partition(".")[0]}
    overridden: dict[str, FunctionType] = {}
    theirs: set[str] = set()
    for owner in found.__mro__[:-1]:
        if owner.__module__.partition(".")[0] in ours:
            for name, member in _methods(owner).items():
                if name in theirs:
                    overridden.setdefault(name, member)
        else:
            theirs.update(vars(owner))
    return overridden


def _check_override(found: type, name: str, wanted: FunctionType) -> None:
    """Check that ``found.name`` accepts the calls of ``wanted``, on an instance of ``found``."""
    parameters = list(inspect.signature(wanted).parameters.values())
    places = [
        one.name
        for one in parameters
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    keywords = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    if isinstance(inspect.getattr_static(found, name), staticmethod | classmethod):
        places = places[1:]
    called = getattr(found, name)
    check_call(called, f"{found.__name__}.{name}", places, keywords)
    if _is_async(called) and not _is_async(wanted):
        raise UserError(f"{found.__name__}.{name} is async: it has to be a plain function")


def _is_async(called: object) -> bool:
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def check_call(
    called: Any, name: str, arguments: Sequence[str], keywords: Sequence[str] = ()
) -> None:
    """Check that ``called`` accepts these positional and keyword arguments.

    Raises:
        UserError: ``called`` is not callable, or takes other arguments.
    """
    listed = [*arguments, *(f"{keyword}=" for keyword in keywords)]
    wanted = f"{name} has to take ({', '.join(listed)})"
    if not callable(called):
        raise UserError(f"{wanted}: it cannot be called")
    try:
        inspect.signature(called).bind(*arguments, **dict.fromkeys(keywords))
    except (TypeError, ValueError) as error:
        raise UserError(f"{wanted}: {error}") from error


def check_options(found: Any) -> None:
    """Check that ``found.Options`` is a frozen dataclass with a valid default for every option.

    Raises:
        UserError: ``found.Options`` is something else.
    """
    options = getattr(found, "Options", None)
    if not isinstance(options, type) or not is_dataclass(options):
        raise UserError(f"{found.__name__} has no dataclass Options with its options")
    try:
        options()
    except Exception as error:
        why = f"{found.__name__}.Options needs a valid default for each option: {error}"
        raise UserError(why) from error
    check_frozen(options, f"{found.__name__}.Options")


def check_frozen(options: Any, name: str) -> None:
    """Check that a dataclass, or the class of a dataclass instance, is frozen.

    Raises:
        UserError: The dataclass is mutable.
    """
    if not options.__dataclass_params__.frozen:
        raise UserError(f"{name} can be changed: write @dataclass(frozen=True)")
