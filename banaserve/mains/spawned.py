"""Main module of an engine core, a guest or an engine parent in a new process.

``python -m banaserve.mains.spawned PARENT_PID`` reads what it is to be from standard input.
"""

from __future__ import annotations

import sys

import msgspec

from banaserve.base.platform.processes import die_with_parent


def main() -> None:
    die_with_parent(int(sys.argv[1]))  # before imports, which take many seconds
    said = sys.stdin.buffer.read()
    from banaserve.serving.launch import messages

    launch = msgspec.json.decode(said, type=messages.Launch)
    if isinstance(launch, messages.ParentLaunch):
        from banaserve.mains.engine_parent import run_launched

        run_launched(launch)
    else:
        from banaserve.mains.engine import redirect_output, run_order

        redirect_output(launch.log_path)
        run_order(launch)


if __name__ == "__main__":
    main()
