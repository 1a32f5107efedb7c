"""Start of an engine core, a guest or an engine parent as a new process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from banaserve.base.platform.processes import spawn_module
from banaserve.serving.launch.messages import Launch

_MODULE = "banaserve.mains.spawned"


def spawn(
    launch: Launch,
    environment: Mapping[str, str],
    *,
    pass_fds: Sequence[int] = (),
    in_session: bool = False,
) -> subprocess.Popen[bytes]:
    """Start a process; call from a thread that lives as long as the process is to live.

    Args:
        launch: Order or description of what the process is to be.
        environment: Environment of the process.
        pass_fds: File descriptors that the process inherits.
        in_session: True if the process stays in this process's session.

    Raises:
        OSError: The system has no resources for another process.
    """
    return spawn_module(
        _MODULE,
        (str(os.getpid()),),
        msgspec.json.encode(launch),
        environment,
        pass_fds=pass_fds,
        in_session=in_session,
    )
