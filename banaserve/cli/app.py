"""Commands as functions whose parameters are their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

from banaserve.base.arguments import Formatter, Parser, check_rules, options_of, values_of
from banaserve.base.errors import UserError

Function = Callable[..., int | None]
"""Function of a command, which returns the exit code.

The default of a parameter declares an option, as that of a dataclass's field does; a parameter
without default is a dataclass of options, such as those that several commands share.
"""


def _missing() -> None:
    """Stand for the function of an ``App`` that has only sub-commands; ``parse`` refuses it."""


class App:
    """A command, its sub-commands, or both.

    Args:
        main: Function that runs if no sub-command is given; None if one must be given. If it has a
            positional argument, a word that is no sub-command is that argument.
        summary: Help text, if there are sub-commands.
        commands: Functions of the sub-commands by name.
    """

    def __init__(self, main: Function | None, summary: str = "", /, **commands: Function) -> None:
        self.commands = commands
        self._main = main or _missing
        self._summary = summary

    def run(self, prog: str, argv: Sequence[str]) -> int:
        """Parse the words after ``prog``, which is the whole command, and run the function.

        Raises:
            UserError: A word is invalid, or the function raises the error.
            SystemExit: Help was asked for and has been printed.
        """
        function, options = self.parse(prog, argv)
        given = {
            name: options if one.default is one.empty else getattr(options, name)
            for name, one in inspect.signature(function).parameters.items()
        }
        return function(**given) or 0

    def parse(self, prog: str, argv: Sequence[str]) -> tuple[Function, Any]:
        """Return the function that a command line selects, and its options; see ``run``."""
        word = argv[0] if argv else ""
        if word in self.commands:
            function, rest, parser = self.commands[word], argv[1:], self.parser(prog, word)
        elif self._is_wrong(word):
            near = get_close_matches(word, self.commands, 1)
            hint = f"did you mean {near[0]}?" if near else f"give one of {', '.join(self.commands)}"
            is_missing = not word or word.startswith("-")
            wrong = "a command is missing" if is_missing else f"there is no command {word}"
            raise UserError(f"{prog.removeprefix('banaserve ')}: {wrong}: {hint}")
        else:
            function, rest, parser = self._main, argv, self.parser(prog)
        kind = _kind(function)
        options = kind(**values_of(kind, parser.parse_args(rest)))
        check_rules(options)
        return function, options

    def _is_wrong(self, word: str) -> bool:
        """Return whether ``word``, which is no sub-command, should have been one."""
        if self._main is _missing:
            return word not in ("-h", "--help")
        takes_word = not self.commands or bool(_arguments(self._main))
        return bool(word) and not word.startswith("-") and not takes_word

    def parser(self, prog: str, word: str = "") -> Parser:
        """Return the parser of a sub-command; of the words that are none without ``word``."""
        function, is_sub = self.commands.get(word, self._main), word in self.commands
        prog = f"{prog} {word}" if is_sub else prog
        kind = _kind(function)
        words = _arguments(function)
        if self.commands and not is_sub:
            words.append("COMMAND" if function is _missing else "[COMMAND]")
        made = Parser(
            prog=prog,
            usage=" ".join([prog, "[options]", *words]),
            description=inspect.getdoc(function) if is_sub else self._summary or function.__doc__,
            formatter_class=Formatter,
            allow_abbrev=False,
        )
        made.add_options(kind)
        if self.commands and not is_sub:
            width = max(map(len, self.commands))
            lines = [f"  {name:<{width}}  {_line(one)}\n" for name, one in self.commands.items()]
            made.ending = "".join(["\ncommands:\n", *lines])
        return made


@cache
def _kind(function: Function) -> type[Any]:
    """Return the dataclass of a function's options: those that are shared, then its own."""
    hints, own, shared = get_type_hints(function), [], []
    for name, one in inspect.signature(function).parameters.items():
        if one.default is one.empty:
            shared.append(hints[name])
        else:
            own.append((name, hints[name], one.default))
    return make_dataclass(function.__name__, own, bases=(*shared,), frozen=True, kw_only=True)


def _arguments(function: Function) -> list[str]:
    """Return a function's positional arguments as its usage shows them."""
    words = [one for one in options_of(_kind(function)) if not one.name.startswith("-")]
    shown = [(str(one.settings.get("metavar", one.name)), "nargs" in one.settings) for one in words]
    return [f"[{name}]" if is_optional else name for name, is_optional in shown]


def _line(function: Function) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]
