"""Output of commands: one-line errors, and tables, which are plain lines outside a terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from rich.table import Table

# A style of rich; ignored if the output is not a terminal.
Style = str
Say = Callable[[str], None]
T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""Columns of a table: functions that make the cells of a row, by heading."""


def print_error(message: str) -> None:
    """Print ``message`` as one line on standard error."""
    prefix = "\033[31mbanaserve:\033[0m" if sys.stderr.isatty() else "banaserve:"
    print(prefix, " ".join(message.split()), file=sys.stderr, flush=True)


def print_json(found: Any, indent: int | None = 2) -> None:
    """Print messages, or a structure of them, as JSON: indented, or in one line without indent."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(found), indent=indent))


def timed(terminal: TextIO) -> Say:
    """Return a function that prints a line with the seconds since this call."""
    started_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started_s:5.1f} s] {text}", file=terminal, flush=True)

    return say


def rows_of(columns: Columns[T], found: Iterable[T]) -> list[tuple[str, ...]]:
    """Return the headings of a table, and a row for each of ``found``."""
    return [tuple(columns), *(tuple(cell(one) for cell in columns.values()) for one in found)]


def print_rows(rows: Sequence[Sequence[str]], styles: Mapping[str, Style]) -> None:
    """Print ``rows``: aligned and coloured on a terminal, as plain aligned lines elsewhere.

    Args:
        styles: Style of each cell whose whole text is the key.
    """
    if not sys.stdout.isatty():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console

    Console().print(make_table(rows, styles))


def make_table(rows: Sequence[Sequence[str]], styles: Mapping[str, Style]) -> Table:
    """Return ``rows`` as a table of rich; see ``print_rows``."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    return table
