"""Main module of an engine core, a guest or an engine parent in a new process.

``python -m banaserve.engine.vllm.launch.spawned KIND PARENT_PID`` reads its launch description from
standard input.
"""

from __future__ import annotations

import sys

from banaserve.engine.vllm.launch.spawn import LaunchKind
from banaserve.platform.processes import die_with_parent


def main() -> None:
    kind, parent_pid = LaunchKind(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)  # before imports, which take many seconds
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
