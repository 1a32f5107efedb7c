"""Start of an engine core, a guest or an engine parent from nothing."""

from __future__ import annotations

import enum
import os
import subprocess
from collections.abc import Mapping, Sequence

import msgspec

from banaserve.platform.spawning import spawn_module

_MODULE = "banaserve.engine.vllm.launch.spawned"


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
    return spawn_module(
        _MODULE,
        (kind.value, str(os.getpid())),
        msgspec.json.encode(launch),
        environment,
        pass_fds=pass_fds,
        in_session=in_session,
    )
