"""A store daemon in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO


def start_store(
    path: Path, size: int | str, *options: str, stderr: IO[bytes] | int | None = None
) -> subprocess.Popen[bytes]:
    """Start a daemon with its socket at ``path``; returns once clients can connect."""
    readable, writable = os.pipe()
    command = [sys.executable, "-m", "banaserve.kvstore.daemon", "--socket", str(path)]
    command += ["--size", str(size), "--ready-fd", str(writable), "--die-with-parent", *options]
    process = subprocess.Popen(command, pass_fds=[writable], stderr=stderr)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        assert pipe.read() == "ready\n"
    return process
