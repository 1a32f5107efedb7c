"""Process of an engine core, a guest or an engine parent that is started from nothing.

``python -m banaserve.engine.vllm.launch.spawned KIND PARENT_PID`` reads what it is to serve from
its standard input: every user of the machine sees command lines, and options may be secrets.
"""

from __future__ import annotations

import enum
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from banaserve.platform.processes import die_with_parent


class LaunchKind(enum.Enum):
    """What a process is to be."""

    ENGINE = "engine"
    GUEST = "guest"
    PARENT = "parent"


def spawn(
    kind: LaunchKind,
    launch: msgspec.Struct,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    in_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start one. Call it from a thread that lives as long as the process is to live.

    Args:
        launch: What its module's ``run_launched`` reads.
        in_session: Whether it stays in this process's session.

    Raises:
        OSError: There are no means for another process.
    """
    command = [sys.executable, "-m", __name__, kind.value, str(os.getpid())]
    said = os.memfd_create("launch")
    try:
        with os.fdopen(os.dup(said), "wb") as writer:
            writer.write(msgspec.json.encode(launch))
        os.lseek(said, 0, os.SEEK_SET)
        return subprocess.Popen(
            command,
            stdin=said,
            env=dict(environment),
            pass_fds=pass_fds,
            start_new_session=not in_session,
        )
    finally:
        os.close(said)


def main() -> None:
    kind, parent_pid = LaunchKind(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)  # before imports of many seconds
    said = sys.stdin.buffer.read()
    match kind:
        case LaunchKind.ENGINE:
            from banaserve.engine.vllm.launch.engine_main import run_launched
        case LaunchKind.GUEST:
            from banaserve.engine.vllm.launch.guest_main import run_launched
        case LaunchKind.PARENT:
            from banaserve.engine.vllm.launch.forkserver import run_launched
    run_launched(said)


if __name__ == "__main__":
    main()
