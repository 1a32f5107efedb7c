"""Command lines whose options are declared once, as the fields of a dataclass.

``option`` declares a field together with its option, ``Parser.add_options`` adds the options of a
class, ``values_of`` reads them back, and ``check_rules`` checks the values of an object.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, NoReturn

from banaserve.base.errors import UserError

Options = tuple[tuple[str, str | int | float], ...]
"""Options of a policy, as pairs of a name and a value."""
Reader = Callable[[argparse.Namespace], Any]
_MAX_WIDTH = 100
_OPTION_WIDTH = 34
_LIKENESS = 0.75
"""Least likeness of a word to the option that an error suggests instead."""
_UNITS = {"_gb_per_s": "GB/S", "_s": "SECONDS", "_tokens": "TOKENS"}
_NO_NAMES: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition of a value.

    Attributes:
        words: End of the message on a value that does not meet the condition.
    """

    holds: Callable[[Any], bool]
    words: str


ABOVE_0 = Rule(lambda value: value > 0, "must be more than 0")
AT_LEAST_1 = Rule(lambda value: value >= 1, "must be at least 1")
NOT_NEGATIVE = Rule(lambda value: value >= 0, "must not be negative")


@dataclass(frozen=True, slots=True)
class Option:
    """Option, or positional argument, of a command line.

    Attributes:
        name: Name with its dashes, or that of a positional argument; empty for the field's name
            without its unit.
        group: Group under which the help shows the option.
        settings: Arguments of argparse's ``add_argument``.
        rule: Condition of the value; None for none.
    """

    name: str
    group: str
    settings: Mapping[str, Any]
    rule: Rule | None = None


def extra(
    name: str,
    help: str,
    default: Any = None,
    kind: Callable[[str], Any] | None = None,
    *,
    group: str = "",
    rule: Rule | None = None,
    **settings: Any,
) -> Option:
    """Return an option that is no field: the readers of other fields use it.

    A default of False makes a flag, one of True a flag that begins with ``--no-`` or a pair of
    flags, and a tuple an option that may be repeated.

    Args:
        help: Help text; ``{names}`` stands for the names that ``add_options`` is given.
        default: Value if the option is not given; MISSING if it must be given.
        kind: Function that reads a value; by default the type of a numeric default.
        settings: Further arguments of ``add_argument``.
    """
    settings["help"] = help
    if isinstance(default, bool) and "choices" in settings:
        settings["default"] = "on" if default else "off"
    elif isinstance(default, bool):
        usual = "store_false" if name.startswith("--no-") else argparse.BooleanOptionalAction
        settings.setdefault("action", usual if default else "store_true")
        settings["default"] = default
    elif isinstance(default, tuple) and "action" not in settings:
        settings |= {"action": "append", "default": []}
    elif default is not MISSING:
        settings["default"] = default or None if isinstance(default, tuple) else default
        kind = kind or (type(default) if isinstance(default, (int, float)) else None)
    if kind is not None:
        settings["type"] = kind
    if kind is int:
        settings.setdefault("metavar", "N")
    return Option(name, group, settings, rule)


def option(
    help: str,
    default: Any = MISSING,
    kind: Callable[[str], Any] | None = None,
    *,
    name: str = "",
    read: Reader | None = None,
    also: Sequence[Option] = (),
    decided: bool = False,
    **settings: Any,
) -> Any:
    """Declare a field of a dataclass and the option that sets it; see ``extra``.

    Args:
        default: Default of the field; without one, the option is required.
        read: Function that makes the field's value of all parsed options.
        also: Further options, shown after this one.
        decided: True if the value depends on other options where this one is not given.
    """
    own = extra(name, help, default, kind, **settings)
    if decided:
        own = replace(own, settings={**own.settings, "default": None})
    return field(default=default, metadata={"own": own, "also": also, "read": read})


def derived(default: Any, read: Reader, *also: Option, is_shown: bool = True) -> Any:
    """Declare a field that ``read`` makes of other options, such as those in ``also``.

    Args:
        is_shown: False keeps the field out of the object's representation.
    """
    return field(default=default, repr=is_shown, metadata={"also": also, "read": read})


def pairs(help: str, *, name: str, metavar: str = "KEY=VALUE", **settings: Any) -> Any:
    """Declare a field of ``Options`` and the option, given once for each pair, that sets it."""
    dest = name.lstrip("-").replace("-", "_")

    def read(known: argparse.Namespace) -> Options:
        return tuple(read_pair(name, text) for text in getattr(known, dest))

    return derived((), read, extra(name, help, (), metavar=metavar, **settings))


def argument(help: str, default: Any = MISSING, **settings: Any) -> Any:
    """Declare a field and the positional argument that sets it; a tuple takes all further words."""
    if default is not MISSING:
        settings |= {"nargs": "*" if isinstance(default, tuple) else "?", "default": default}
    own = Option("", "", {**settings, "help": help})
    return field(default=default, metadata={"own": own, "is_argument": True})


def options_of(kind: type) -> Iterator[Option]:
    """Yield the options of a dataclass in the order of its fields, with their full names."""
    for one in fields(kind):
        own = one.metadata.get("own")
        if own is not None and "is_argument" in one.metadata:
            yield replace(own, name=one.name)
        elif own is not None:
            required = {"required": True} if one.default is MISSING else {}
            units = [words for unit, words in _UNITS.items() if one.name.endswith(unit)]
            settings = {**own.settings, **required, "dest": one.name}
            if units:
                settings["metavar"] = units[0]
            yield replace(own, name=_name(one), settings=settings)
        yield from one.metadata.get("also", ())


def _name(one: Field[Any]) -> str:
    """Return the name of a field's own option."""
    return one.metadata["own"].name or f"--{one.name.removesuffix('_s').replace('_', '-')}"


def values_of(kind: type, known: argparse.Namespace) -> dict[str, Any]:
    """Return the values of a dataclass's fields; those that are None are left to their defaults.

    Raises:
        UserError: The value of an option that is no field does not meet its rule.
    """
    found: dict[str, Any] = {}
    for one in fields(kind):
        for other in one.metadata.get("also", ()):
            _check(other.name, other.rule, vars(known).get(other.name[2:].replace("-", "_")))
        if (read := one.metadata.get("read")) is not None:
            found[one.name] = read(known)
        elif "own" in one.metadata:
            value = getattr(known, one.name)
            is_choice = isinstance(one.default, bool) and isinstance(value, str)
            value = value == "on" if is_choice else value
            found[one.name] = tuple(value) if isinstance(value, list) else value
    return {name: value for name, value in found.items() if value is not None}


def check_rules(made: Any) -> None:
    """Check the values of an object's fields.

    Raises:
        UserError: A value does not meet the rule of its option.
    """
    for one in fields(made):
        if (own := one.metadata.get("own")) is not None:
            _check(_name(one), own.rule, getattr(made, one.name))


def _check(name: str, rule: Rule | None, value: Any) -> None:
    if rule is not None and value is not None and not rule.holds(value):
        shown = f"{value:g}" if isinstance(value, float) else value
        raise UserError(f"{name} {shown}: {rule.words}")


class Formatter(argparse.HelpFormatter):
    """Formatter that adds an option's default in brackets, unless its help ends with brackets."""

    def __init__(self, prog: str) -> None:
        width = min(_MAX_WIDTH, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, max_help_position=min(_OPTION_WIDTH, width // 3), width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        return "\n\n".join(fill(one, width, indent) for one in text.split("\n\n"))

    def _get_help_string(self, action: argparse.Action) -> str:
        words, default = action.help or "", action.default
        if action.required and action.option_strings:
            return f"{words} (required)"
        is_said = words.endswith(")")
        # A flag's default says nothing; a zero or empty default has a special meaning.
        if is_said or not default or isinstance(default, bool) or default == argparse.SUPPRESS:
            return words
        return f"{words} ({default:g})" if isinstance(default, float) else f"{words} ({default})"


class Parser(argparse.ArgumentParser):
    """A parser whose ``prog`` is the whole command, such as ``banaserve serve``.

    Attributes:
        groups: Options of each group that ``add_options`` has added.
        ending: Lines after the help.

    Raises:
        UserError: From ``parse_args``: an argument or a value is invalid.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.groups: dict[str, list[argparse.Action]] = {}
        self.ending = ""

    def format_help(self) -> str:
        return super().format_help() + self.ending

    def add_options(self, kind: type, names: Mapping[str, Sequence[str]] = _NO_NAMES) -> None:
        """Add the options of a dataclass.

        Args:
            names: Values that are registered elsewhere, by the name of the option that takes them.
        """
        sections: dict[str, argparse._ActionsContainer] = {"": self}
        for one in options_of(kind):
            settings = dict(one.settings)
            if one.name in names:
                settings["help"] = settings["help"].format(names=", ".join(names[one.name]))
                if "choices" in settings:
                    settings["choices"] = names[one.name]
            takes_word = "choices" not in settings and settings.get("action", "append") == "append"
            if one.name.startswith("-") and takes_word:
                settings.setdefault("metavar", one.name.lstrip("-").replace("-", "_").upper())
            if one.group and one.group not in sections:
                sections[one.group] = self.add_argument_group(one.group)
            action = sections[one.group].add_argument(one.name, **settings)
            self.groups.setdefault(one.group, []).append(action)

    def options(self) -> dict[str, argparse.Action]:
        """Return the options by name, aliases and ``--help`` included."""
        return {name: action for action in self._actions for name in action.option_strings}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the values of all options; an unknown word is an error."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0], self.options(), 1, _LIKENESS)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("banaserve ")
        raise UserError(f"{name}: {message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """Return the integer above 0 that ``text`` spells: the ``type`` of an option.

    Raises:
        argparse.ArgumentTypeError: ``text`` is not such a number.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return number


def read_pair(option: str, text: str) -> tuple[str, str | int | float]:
    """Return key and value of ``text``; a numeric value is returned as a number.

    Args:
        option: Option as the user typed it, for the message.

    Raises:
        UserError: ``text`` is not a pair.
    """
    key, equals, word = text.partition("=")
    if not equals:
        raise UserError(f"{option} {text}: write KEY=VALUE")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return key.replace("-", "_"), kind(word)
    return key.replace("-", "_"), word
