"""``banaserve serve`` and ``banaserve node`` with mock engines; all else is the real thing.

Usage: as ``python -m banaserve``, with ``tests/mock_engine`` in PYTHONPATH.
"""

from __future__ import annotations

import os
import socket

from banaserve.__main__ import run
from banaserve.cli.serve import launch as serve_launch
from banaserve.engine.vllm.launch import messages, spawn
from banaserve.engine.vllm.launch.launcher import ForkLauncher
from banaserve.engine.vllm.launch.parent_link import ParentLink, start_parent
from mock_facts import MockOptions


def mock_launcher(argv: list[str]) -> ForkLauncher:
    """Launcher of mock cores, which one small parent forks."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = spawn.spawn(
            spawn.LaunchKind.PARENT,
            messages.ParentLaunch(argv, theirs.fileno()),
            os.environ,
            pass_fds=(theirs.fileno(),),
            in_session=True,
        )
    return ForkLauncher(ParentLink(ours, process.pid, process), lambda: start_parent(argv))


def mock_engines() -> None:
    """Let this process, and all that it starts, start mock cores in place of engines."""
    spawn._MODULE = "mock_parent"
    serve_launch._fork_launcher = lambda argv, _config: mock_launcher(argv)
    instance_bytes = MockOptions.read().instance_bytes
    serve_launch._instance_bytes = lambda *_: instance_bytes


if __name__ == "__main__":
    mock_engines()
    run()
