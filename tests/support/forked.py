"""Processes forked from one that has imported what they need: imports are most of a start's time.

One such parent serves a test process. What a user types is tested by starting it as a user does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from typing import IO, Any

_CONTEXT = multiprocessing.get_context("forkserver")
# pytest itself: a child imports the main module of its starter.
_CONTEXT.set_forkserver_preload(
    [
        "pytest",
        "banaserve.kvstore.daemon.process",
        "banaserve.transport.channels.connect",
        "banaserve.transport.backends.shm",
        "banaserve.transport.backends.tcp",
        "banaserve.transport.backends.torch_distributed",
    ]
)


@dataclass(frozen=True, slots=True)
class Fd:
    """A file descriptor among a forked process's arguments: a number of its own there."""

    number: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (reduction.DupFd(self.number),)


def _received(sent: Any) -> int:
    number: int = sent.detach()
    return number


class Forked:
    """A running ``target(*arguments)``, with that part of ``subprocess.Popen`` that tests use.

    Args:
        target: A function of a module; what it returns is the exit code.
        arguments: For it. Each ``Fd`` arrives as a number.
        pipes: Whether its standard input and output are ours; else its output is lost.
        stderr: Where its standard error goes; None for where ours goes.
    """

    def __init__(
        self,
        target: Callable[..., int | None],
        *arguments: Any,
        pipes: bool = False,
        stderr: IO[bytes] | int | None = None,
    ) -> None:
        theirs: dict[int, Fd] = {}
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        if pipes:
            (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
            self.stdin, self.stdout = os.fdopen(to_child, "w"), os.fdopen(from_child)
            theirs = {0: Fd(stdin), 1: Fd(stdout)}
        if stderr is not None:
            devnull = stderr == subprocess.DEVNULL
            number = os.open(os.devnull, os.O_WRONLY) if devnull else os.dup(_fileno(stderr))
            theirs[2] = Fd(number)
        self._process = _CONTEXT.Process(
            target=_run, args=(target, arguments, theirs, dict(os.environ)), daemon=True
        )
        self._process.start()
        for fd in theirs.values():
            os.close(fd.number)
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # The fork server reaps it before it tells us.
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()
        self.wait()


def _fileno(stream: IO[bytes] | int) -> int:
    return stream if isinstance(stream, int) else stream.fileno()


def _run(
    target: Callable[..., int | None],
    arguments: tuple[Any, ...],
    standard: Mapping[int, int],
    environment: Mapping[str, str],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, given in standard.items():
        os.dup2(given, number)
        os.close(given)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.exit(target(*arguments))
