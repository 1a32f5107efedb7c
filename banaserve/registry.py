"""Registry of the implementations of one interface, by name; other packages can add theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from banaserve.errors import UserError
from banaserve.names import check_known

T = TypeVar("T")
C = TypeVar("C")

OWN = "banaserve"
"""The package of what is registered without another package's name."""


class Registry(Generic[T]):
    """Implementations of one kind by name.

    Args:
        kind: As messages call it, such as ``routing policy``.
        check: Returns an object of another package as an implementation under the given name;
            raises ``UserError``, which says what is wrong with it.
        built_in: Modules that register the implementations of banaserve itself when they are
            imported, which happens at the first question.

    Attributes:
        refused: For each name that was refused and is not taken: the package and what is wrong.
    """

    def __init__(
        self, kind: str, check: Callable[[str, object], T], built_in: Sequence[str] = ()
    ) -> None:
        self.kind = kind
        self.refused: dict[str, str] = {}
        self._check = check
        self._built_in = built_in
        self._found: dict[str, T] = {}
        self._offers: dict[str, tuple[str, object]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Returns a class decorator that makes the class known as ``name``.

        Raises:
            ValueError: From the decorator: the name is taken.
        """

        def add(found: C) -> C:
            self.add(name, found)  # type: ignore[arg-type]  # C is a T; a decorator keeps its type
            return found

        return add

    def add(self, name: str, found: T) -> None:
        """Makes ``found`` known as ``name``.

        Raises:
            ValueError: The name is taken.
        """
        if name in self._found:
            raise ValueError(f"a {self.kind} named {name!r} exists already")
        self._found[name], self._offers[name] = found, (OWN, found)

    def add_plugin(self, name: str, found: object, package: str) -> None:
        """Makes an object of another package known as ``name``, unless it is already.

        Args:
            found: What the package's entry point refers to; it is checked.
            package: Name and version, for messages.

        Raises:
            UserError: The name is taken, or ``found`` does not implement the interface.
        """
        if name in self.names():
            owner, offered = self._offers[name]
            if owner == package and offered is found:
                return
            raise UserError(f"the name is taken by {owner}: it needs another one")
        self._found[name], self._offers[name] = self._check(name, found), (package, found)
        self.refused.pop(name, None)

    def refuse(self, name: str, package: str, why: str) -> None:
        """Remembers why a package's ``name`` is not known, for later errors."""
        if name not in self.names():
            self.refused[name] = f"{package} offers it and was refused: {why}"

    def names(self) -> list[str]:
        """Returns every known name in alphabetical order."""
        for module in self._built_in:
            import_module(module)
        return sorted(self._found)

    def get(self, name: str) -> T:
        """Returns the implementation ``name``.

        Raises:
            UserError: There is none: lists those there are, or says why it was refused.
        """
        check_known(self.kind, name, self.names(), self.refused)
        return self._found[name]


def check_class(found: object, interface: type, arguments: Sequence[str] | None = None) -> Any:
    """Returns ``found``, a class that has the methods of ``interface``.

    Args:
        interface: A protocol or base class: each of its public methods is needed, with as many
            arguments as there.
        arguments: Those that the class is built with, in their order; None: not checked.

    Raises:
        UserError: ``found`` is no such class; names what is missing or differs.
    """
    if not isinstance(found, type):
        raise UserError(f"it refers to {found!r}, which is no class")
    wanted = {
        name: list(inspect.signature(member).parameters)
        for name, member in vars(interface).items()
        if not name.startswith("_") and inspect.isfunction(member)
    }
    have = dict(inspect.getmembers(found))
    missing = [name for name in wanted if name not in have]
    missing += [name for name, one in have.items() if getattr(one, "__isabstractmethod__", False)]
    if missing:
        raise UserError(f"{found.__name__} lacks {', '.join(sorted(missing))}")
    for name, parameters in wanted.items():
        check_call(have[name], f"{found.__name__}.{name}", parameters)
    if arguments is not None:
        check_call(found, found.__name__, arguments)
    return found


def check_call(called: Any, name: str, arguments: Sequence[str]) -> None:
    """Returns if ``called`` can be called with these arguments by place.

    Raises:
        UserError: It is no function, or takes others.
    """
    wanted = f"{name} has to take ({', '.join(arguments)})"
    if not callable(called):
        raise UserError(f"{wanted}: it cannot be called")
    try:
        inspect.signature(called).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{wanted}: {error}") from error


def check_options(found: Any) -> None:
    """Returns if ``found.Options`` is a dataclass in which every option has a valid default.

    Raises:
        UserError: It is not.
    """
    options = getattr(found, "Options", None)
    if not isinstance(options, type) or not is_dataclass(options):
        raise UserError(f"{found.__name__} has no dataclass Options with its options")
    try:
        options()
    except Exception as error:
        why = f"{found.__name__}.Options needs a valid default for each option: {error}"
        raise UserError(why) from error


def build_options(
    owner: str, known: Sequence[str], build: Callable[..., C], section: Mapping[str, Any]
) -> C:
    """Returns ``build(**section)``: the options of one policy from its section of a configuration.

    Args:
        owner: Whose options they are, for messages.
        known: Names of its options.

    Raises:
        UserError: An unknown option, or a value out of range.
    """
    for option in section:
        check_known(f"option of {owner}", option, known)
    try:
        return build(**section)
    except (TypeError, ValueError) as error:
        raise UserError(f"options of {owner}: {error}") from error


def option_names(options: Any) -> list[str]:
    """Returns the names of the fields of a dataclass or of an instance of one."""
    return [field.name for field in fields(options)]
