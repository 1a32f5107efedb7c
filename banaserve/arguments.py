"""Parsing of command lines."""

from __future__ import annotations

import argparse
import contextlib
from typing import NoReturn

from banaserve.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser whose ``prog`` is the whole command, such as ``banaserve serve``.

    Raises:
        UserError: From ``parse_args``: a word or a value that makes no sense.
    """

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("banaserve ")
        raise UserError(f"{name}: {message} (see {self.prog} --help)")


def positive(text: str) -> int:
    """Reads a whole number above 0: the ``type`` of an option.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number above 0")
    return number


def read_pair(option: str, text: str) -> tuple[str, str | int | float]:
    """Returns key and value of ``text``; a value that is a number is one.

    Args:
        option: As typed, for the message.

    Raises:
        UserError: ``text`` is no pair.
    """
    key, equals, word = text.partition("=")
    if not equals:
        raise UserError(f"{option} {text}: write KEY=VALUE")
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return key.replace("-", "_"), kind(word)
    return key.replace("-", "_"), word
