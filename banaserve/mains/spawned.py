"""Main module of an engine core, a guest or an engine parent in a new process.

``python -m banaserve.mains.spawned KIND PARENT_PID`` reads its launch description from
standard input.
"""

from __future__ import annotations

import sys

from banaserve.base.platform.processes import die_with_parent
from banaserve.serving.launch.spawn import LaunchKind


def main() -> None:
    kind, parent_pid = LaunchKind(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent_pid)  # before imports, which take many seconds
    said = sys.stdin.buffer.read()
    match kind:
        case LaunchKind.ENGINE:
            from banaserve.mains.engine import run_launched
        case LaunchKind.GUEST:
            from banaserve.mains.guest import run_launched
        case LaunchKind.PARENT:
            from banaserve.mains.engine_parent import run_launched
    run_launched(said)


if __name__ == "__main__":
    main()
