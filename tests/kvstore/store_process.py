"""A store daemon in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from banaserve.kvstore.daemon.connections import peer_server
from banaserve.kvstore.daemon.process import main
from banaserve.kvstore.peers import link, push
from banaserve.transport.channels import stream
from forked import Fd, Forked

_PATIENCE_S = 600.0
_OF_PEERS = [
    *((peer_server, name) for name in ("GREETING_S", "ANSWER_S", "PUSH_SILENT_S")),
    *((link, name) for name in ("CONNECT_S", "ANSWER_S")),
    *((push, name) for name in ("ANSWER_S", "SEND_S")),
    (stream, "STALL_S"),
]


def be_patient(set_limit: Callable[[object, str, float], None] = setattr) -> None:
    """Take no peer that stands still for lost, in this process."""
    for module, name in _OF_PEERS:
        set_limit(module, name, _PATIENCE_S)


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
    path: Path,
    size: int | str,
    *options: str,
    stderr: IO[bytes] | int | None = None,
    is_patient: bool = False,
) -> Forked:
    """The same from a process that has imported the daemon: a twentieth of the time.

    Args:
        is_patient: True if no peer that stands still is taken for lost.
    """
    readable, writable = os.pipe()
    arguments = ["--socket", str(path), "--size", str(size), "--die-with-parent", *options]
    process = Forked(_run_store, arguments, Fd(writable), is_patient, stderr=stderr)
    os.close(writable)
    _until_ready(readable, stderr)
    return process


def _run_store(arguments: list[str], ready_fd: int, is_patient: bool) -> int:
    if is_patient:
        be_patient()
    return main([*arguments, "--ready-fd", str(ready_fd)])


def _until_ready(readable: int, stderr: IO[bytes] | int | None) -> None:
    with os.fdopen(readable) as pipe:
        said = pipe.read()
    name = getattr(stderr, "name", None)
    log = Path(name).read_text() if isinstance(name, str) else "its log is not kept"
    assert said == "ready\n", f"the store did not start: {log}"
