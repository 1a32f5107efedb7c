"""Commands that may take long: output into the log and to a reader, on a terminal of their own."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from installer import places

_ROWS, _COLUMNS = 60, 160


@dataclass(frozen=True)
class Ended:
    """How a command ended, and all that it printed."""

    code: int
    output: str

    @property
    def killed(self) -> bool:
        """Ended by SIGKILL: by the kernel for lack of memory, as a rule."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def run(
    command: Sequence[str | Path],
    read: Callable[[str], None] = lambda _: None,
    environment: Mapping[str, str] | None = None,
    on_terminal: bool = False,
    cwd: Path = places.ROOT,
) -> Ended:
    """Run ``command`` to its end.

    Args:
        read: Gets output while it comes: pieces of any size on a terminal, else lines.
        on_terminal: Let the command see a terminal: uv counts bytes on one alone.
    """
    variables = {**os.environ, **(environment or {})}
    words = [str(word) for word in command]
    output = (_on_terminal if on_terminal else _on_pipe)(words, read, variables, cwd)
    with contextlib.suppress(OSError), places.LOG.open("a") as log:
        log.write(f"$ {' '.join(words)}\n{output.output}\n")
    return output


def quietly(command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> str:
    """What ``command`` prints on standard output; empty where it fails or is not there."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _on_pipe(
    words: list[str], read: Callable[[str], None], variables: dict[str, str], cwd: Path
) -> Ended:
    heard = []
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=variables,
        cwd=cwd,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            heard.append(line)
            read(line)
    return Ended(process.returncode, "".join(heard))


def _on_terminal(
    words: list[str], read: Callable[[str], None], variables: dict[str, str], cwd: Path
) -> Ended:
    ours, theirs = pty.openpty()
    # Names and bytes stand in one row of a wide terminal.
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    variables = {**variables, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=variables, cwd=cwd
    )
    os.close(theirs)
    heard = []
    try:
        while piece := _piece(ours):
            heard.append(piece)
            read(piece)
    finally:
        os.close(ours)
        code = process.wait()
    return Ended(code, "".join(heard))


def _piece(terminal: int) -> str:
    """The next output; empty when the last process on the terminal has ended."""
    try:
        return os.read(terminal, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
