"""Python processes of this package that are told what to do on standard input.

Every user of the machine sees command lines, and what a process is to do may hold secrets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def spawn_module(
    module: str,
    arguments: Sequence[str],
    said: bytes,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    in_session: bool = False,
    output: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module ARGUMENTS...``, which reads ``said`` from its standard input.

    Call it from a thread that lives as long as the process is to live, where that dies with its
    parent.

    Args:
        in_session: Whether it stays in this process's session.
        output: Descriptor for what it prints; None for where this process prints.

    Raises:
        OSError: There are no means for another process.
    """
    command = [sys.executable, "-m", module, *arguments]
    memory = os.memfd_create("launch")
    try:
        with os.fdopen(os.dup(memory), "wb") as writer:
            writer.write(said)
        os.lseek(memory, 0, os.SEEK_SET)
        return subprocess.Popen(
            command,
            stdin=memory,
            stdout=output,
            stderr=output,
            env=dict(environment),
            pass_fds=pass_fds,
            start_new_session=not in_session,
        )
    finally:
        os.close(memory)
