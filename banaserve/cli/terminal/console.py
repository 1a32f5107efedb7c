"""Output of commands: one-line errors, and tables, which are plain lines outside a terminal."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from banaserve.base.text.printable import printable

if TYPE_CHECKING:
    from rich.table import Table


# A style of rich; ignored if the output is not a terminal.
Style = str
Say = Callable[[str], None]
_TICK_S = 1.0
_REST_OF_LINE_ERASED = "\033[K"
T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""Columns of a table: functions that make the cells of a row, by heading."""


def print_error(message: str) -> None:
    """Print ``message`` as one line on standard error."""
    prefix = "\033[31mbanaserve:\033[0m" if sys.stderr.isatty() else "banaserve:"
    print(prefix, printable(" ".join(message.split())), file=sys.stderr, flush=True)


def print_json(found: Any, indent: int | None = 2) -> None:
    """Print messages, or a structure of them, as JSON: indented, or in one line without indent."""
    import msgspec

    print(json.dumps(msgspec.to_builtins(found), indent=indent))


def timed(terminal: TextIO, end: str = "\n") -> Say:
    """Return a function that prints a line with the seconds since this call."""
    started_s = time.monotonic()

    def say(text: str) -> None:
        seconds = time.monotonic() - started_s
        print(f"[{seconds:5.1f} s] {text}", end=end, file=terminal, flush=True)

    return say


@contextlib.contextmanager
def counting(terminal: TextIO, tick: Say) -> Iterator[Callable[[], None]]:
    """Call ``tick`` each second on a thread of its own, if ``terminal`` is a terminal.

    Args:
        tick: Function of ``timed`` that ends in a carriage return: any other output overwrites it.

    Yields:
        Function that ends this before the block ends.
    """
    over = threading.Event()

    def count() -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone shows no seconds
            while not over.wait(_TICK_S):
                tick("")

    def stop() -> None:
        over.set()
        if thread.is_alive():
            thread.join()
            print(_REST_OF_LINE_ERASED, end="", file=terminal, flush=True)

    thread = threading.Thread(target=count, daemon=True)
    if terminal.isatty():
        thread.start()
    try:
        yield stop
    finally:
        stop()


def rows_of(columns: Columns[T], found: Iterable[T]) -> list[tuple[str, ...]]:
    """Return the headings of a table, and a row for each of ``found``."""
    return [tuple(columns), *(tuple(cell(one) for cell in columns.values()) for one in found)]


def print_rows(rows: Sequence[Sequence[str]], styles: Mapping[str, Style]) -> None:
    """Print ``rows``: aligned and coloured on a terminal, as plain aligned lines elsewhere.

    Args:
        rows: Rows of cells, of which only printable characters are shown.
        styles: Style of each cell whose whole text is the key.
    """
    if not sys.stdout.isatty():
        rows = [[printable(cell) for cell in row] for row in rows]
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
        table.add_row(*(Text(printable(cell), style=styles.get(cell, "")) for cell in row))
    return table


@contextlib.contextmanager
def quiet(log_path: Path) -> Iterator[TextIO]:
    """Send all output of this process, vLLM's too, to a log; yield the terminal for our own output.

    The descriptors 1 and 2 are restored at the end of the context; the levels of logging stay.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # A library that vLLM's server imports sets the root logger to errors only.
    logging.getLogger("banaserve").setLevel(logging.INFO)
    terminal = os.fdopen(saved_out, "w", buffering=1)
    atexit.register(_hush)
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        terminal.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_err)


def _hush() -> None:
    """Discard standard error at exit: native libraries that vLLM loads report their leaks there."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
