"""Registry of the implementations of one interface, by name; other packages can add to it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import FunctionType, NoneType, UnionType
from typing import Any, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from banaserve.base.errors import UserError
from banaserve.base.names import check_known

T = TypeVar("T")
C = TypeVar("C")

OWN = "banaserve"
"""Package name of the implementations that banaserve itself registers."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_TAKES: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
}
"""Option types that values are checked against, with their descriptions in messages."""


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


def build_options(
    owner: str,
    options: Any,
    build: Callable[..., C],
    section: Mapping[str, Any],
    package: str = OWN,
) -> C:
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
    try:
        return build(**given)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(f"options of {_of(owner, package)}: {error}") from error
    except Exception as error:
        if package == OWN:
            raise
        why = f"options of {_of(owner, package)}: {one_line(error)}"
        raise UserError(why) from error


def build_policy(owner: str, package: str, build: Callable[..., C], *arguments: Any) -> C:
    """Return ``build(*arguments)``: a policy with its options.

    Raises:
        UserError: A policy of another package cannot be built; the message names the package.
    """
    try:
        return build(*arguments)
    except UserError:
        raise
    except Exception as error:
        if package == OWN:
            raise
        raise UserError(f"{_of(owner, package)}: {one_line(error)}") from error


def _of(owner: str, package: str) -> str:
    return owner if package == OWN else f"{owner} of {package}"


def _typed(owner: str, option: str, value: Any, types: Sequence[type]) -> Any:
    """Return ``value`` converted to one of ``types``; unchanged if ``types`` is empty."""
    if not types or type(value) in types or (type(value) is int and float in types):
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


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` in one line, after its class unless it is a ``UserError``."""
    words = _ADDRESS.sub("", " ".join(str(error).split()))
    if isinstance(error, UserError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
