"""A store daemon in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from banaserve.kvstore.daemon.process import main
from forked import Fd, Forked


def start_store(
    path: Path,
    size: int | str,
    *options: str,
    stderr: IO[bytes] | int | None = None,
    within: Callable[[Sequence[str]], list[str]] = list,
) -> subprocess.Popen[bytes]:
    """Start a daemon with its socket at ``path``; returns once clients can connect.

    Args:
        within: Puts before a command what says where it runs.
    """
    readable, writable = os.pipe()
    command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--socket", str(path)]
    command += ["--size", str(size), "--ready-fd", str(writable), "--die-with-parent", *options]
    process = subprocess.Popen(within(command), pass_fds=[writable], stderr=stderr)
    os.close(writable)
    _until_ready(readable, stderr)
    return process


def fork_store(
    path: Path, size: int | str, *options: str, stderr: IO[bytes] | int | None = None
) -> Forked:
    """The same from a process that has imported the daemon: a twentieth of the time."""
    readable, writable = os.pipe()
    arguments = ["--socket", str(path), "--size", str(size), "--die-with-parent", *options]
    process = Forked(_run_store, arguments, Fd(writable), stderr=stderr)
    os.close(writable)
    _until_ready(readable, stderr)
    return process


def _run_store(arguments: list[str], ready_fd: int) -> int:
    return main([*arguments, "--ready-fd", str(ready_fd)])


def _until_ready(readable: int, stderr: IO[bytes] | int | None) -> None:
    with os.fdopen(readable) as pipe:
        said = pipe.read()
    name = getattr(stderr, "name", None)
    log = Path(name).read_text() if isinstance(name, str) else "its log is not kept"
    assert said == "ready\n", f"the store did not start: {log}"
