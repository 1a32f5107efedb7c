"""Entry of ``python -m banaserve``, which is the ``banaserve`` command."""

import sys

from banaserve.base.platform.processes import end_now
from banaserve.cli.main import main


def run() -> None:
    """Run one sub-command and end the process with its exit code."""
    try:
        code: object = main()
    except SystemExit as leaving:
        code = leaving.code
    if sys.argv[1:2] == ["serve"] and isinstance(code, int):
        end_now(code)  # all resources of the server are closed by now
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    run()
