"""Bytes of large packages while they arrive, from what pip and uv print about them."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable

_LARGE_BYTES = 5_000_000
_LINE_EVERY_S = 4.0
_DRAW_EVERY_S = 0.2
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_UV_BAR = re.compile(
    r"([A-Za-z0-9][A-Za-z0-9._-]*)\s+[^\w\s]*(?:\s*[^\w\s])*\s*"
    r"([\d.]+)\s?([KMG]?i?B)\s?/\s?([\d.]+)\s?([KMG]?i?B)"
)
_PIP_FILE = re.compile(r"^\s*Downloading (?:\S*/)?([A-Za-z0-9._]+?)-\d\S* \(([\d.]+) ([kMG]?B)\)")
_PIP_BYTES = re.compile(r"^Progress (\d+) of (\d+)")


class Progress:
    """Latest state of every large download, drawn on a terminal, else told every few seconds."""

    def __init__(
        self,
        write: Callable[[str], object] = sys.stdout.write,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._clock = clock
        self._next = clock() + (0.0 if self._terminal else _LINE_EVERY_S / 2)
        self._arriving: dict[str, tuple[int, int]] = {}
        self._arrived = 0
        self._told = ""
        self._pip_file = ""

    def read_uv(self, text: str) -> None:
        """Take a piece of what uv draws on a terminal."""
        for name, done, done_unit, size, size_unit in _UV_BAR.findall(_ESCAPES.sub("", text)):
            self._note(name, _bytes(done, done_unit), _bytes(size, size_unit))
        self._show()

    def read_pip(self, line: str) -> None:
        """Take a line of what ``pip --progress-bar raw`` prints."""
        if file := _PIP_FILE.match(line):
            self._pip_file = file[1].replace("_", "-")
            self._note(self._pip_file, 0, _bytes(file[2], file[3]))
        elif (bytes_ := _PIP_BYTES.match(line)) and self._pip_file:
            self._note(self._pip_file, int(bytes_[1]), int(bytes_[2]))
        self._show()

    def end(self) -> None:
        """Leave nothing half drawn."""
        if self._terminal and self._told:
            self._write("\r\x1b[K")
        self._told = ""

    def _note(self, name: str, done: int, size: int) -> None:
        if size < _LARGE_BYTES:
            return
        before = self._arriving.get(name, (0, size))
        if done >= size > before[0]:
            self._arrived += size
        self._arriving[name] = (max(done, before[0]), size)

    def _show(self) -> None:
        if self._clock() < self._next:
            return
        text = self._text()
        if not text or text == self._told:
            return
        self._next = self._clock() + (_DRAW_EVERY_S if self._terminal else _LINE_EVERY_S)
        self._told = text
        if self._terminal:
            width = shutil.get_terminal_size().columns
            self._write(f"\r[install]   {text}"[:width] + "\x1b[K")
        else:
            self._write(f"[install]   {text}\n")
        sys.stdout.flush()

    def _text(self) -> str:
        """The largest that are under way, such as ``torch 120/191 MB``, and what has arrived."""
        under_way = [(n, d, s) for n, (d, s) in self._arriving.items() if d < s]
        under_way.sort(key=lambda one: -one[2])
        words = [f"{name} {_mb(done)}/{_mb(size)} MB" for name, done, size in under_way[:3]]
        if len(under_way) > 3:
            words.append(f"{len(under_way) - 3} more")
        arrived = sum(size for done, size in self._arriving.values() if done >= size)
        if arrived:
            words.append(f"{_mb(arrived)} MB arrived")
        return ", ".join(words)


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _mb(count: int) -> int:
    return round(count / 1e6)
