"""Command lines of banaserve's commands: what is wrong with one is told in one line."""

from __future__ import annotations

import argparse
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
