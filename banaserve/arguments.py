"""Parsing of command lines."""

from __future__ import annotations

import argparse
import contextlib
from typing import NoReturn

from banaserve.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose ``prog`` is the whole command, such as ``banaserve serve``.

    Raises:
        UserError: From ``parse_args``: an argument or a value is invalid.
    """

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
