"""Registry of the implementations of one interface, by name; other packages can add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Generic, TypeVar

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known

T = TypeVar("T")
C = TypeVar("C")

OWN = "banaserve"
"""Package name of the implementations that banaserve itself registers."""


class Registry(Generic[T]):
    """Implementations of one interface, by name.

    Args:
        kind: Kind of implementation as messages call it, such as ``routing policy``.
        check: Function that returns an object of another package as an implementation under the
            given name, or raises ``UserError`` with what is wrong with the object.
        built_in: Modules that register banaserve's own implementations when they are imported,
            which happens at the first lookup.

    Attributes:
        refused: Messages by name, for each name that was refused and is not registered: the package
            and what is wrong with its object.
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
        self._rivals: dict[str, list[str]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Return a class decorator that registers the class as ``name``.

        Raises:
            ValueError: From the decorator: the name is already registered.
        """

        def add(found: C) -> C:
            self.add(name, found)  # type: ignore[arg-type]  # C is a T; a decorator keeps its type
            return found

        return add

    def add(self, name: str, found: T) -> None:
        """Register ``found`` as ``name``.

        Raises:
            ValueError: The name is already registered.
        """
        if name in self._found:
            raise ValueError(f"a {self.kind} named {name!r} exists already")
        self._found[name], self._offers[name] = found, (OWN, found)

    def add_plugin(self, name: str, found: object, package: str) -> None:
        """Register an object of another package as ``name``; idempotent.

        Args:
            found: Object that the package's entry point refers to; it is checked.
            package: Name and version of the package, for messages.

        Raises:
            UserError: The name belongs to another object, or ``found`` does not implement the
                interface.
        """
        if name in self.names():
            owner, offered = self._offers[name]
            if owner == package and offered is found:
                return
            rivals = self._rivals.setdefault(name, [])
            if package not in rivals:
                rivals.append(package)
            raise UserError(f"the name is taken by {owner}: it needs another one")
        self._found[name], self._offers[name] = self._check(name, found), (package, found)
        self.refused.pop(name, None)

    def refuse(self, name: str, package: str, why: str) -> None:
        """Record why a package's ``name`` is not registered, for later error messages."""
        if name not in self.names():
            self.refused[name] = f"{package} offers it and was refused: {why}"

    def names(self) -> list[str]:
        """Return every registered name in alphabetical order."""
        for module in self._built_in:
            import_module(module)
        return sorted(self._found)

    def owner(self, name: str) -> str:
        """Return the package of ``name`` with its version; ``OWN`` for banaserve.

        Raises:
            UserError: The name is not registered.
        """
        self.get(name)
        return self._offers[name][0]

    def label(self, name: str) -> str:
        """Return ``name``, followed by its package if that is not banaserve."""
        owner = self.owner(name)
        return name if owner == OWN else f"{name} of {owner}"

    def rivalry(self, name: str) -> str:
        """Return which package's ``name`` is used if several offer it; empty if only one does."""
        rivals = self._rivals.get(name)
        if not rivals or name not in self._offers:
            return ""
        refused = ", ".join(rivals)
        return f"{self.kind} {name}: that of {self.owner(name)} is used, that of {refused} refused"

    def get(self, name: str) -> T:
        """Return the implementation ``name``.

        Raises:
            UserError: The name is not registered; the message lists the registered names, or gives
                the reason of a refusal.
        """
        check_known(self.kind, name, self.names(), self.refused)
        return self._found[name]
