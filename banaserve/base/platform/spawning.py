"""Python processes of this package that get their instructions on standard input.

Every user of the machine can see command lines, and the instructions may contain secrets.
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

    If the process is to die with its parent, call this from a thread that lives as long as the
    process should.

    Args:
        in_session: True if the process stays in this process's session.
        output: Descriptor for the process's output; None for that of this process.

    Raises:
        OSError: The system has no resources for another process.
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
