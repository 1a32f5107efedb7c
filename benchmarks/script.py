"""Start of a module of its own, as on a GPU machine: ``python -m benchmarks.gpu.smoke``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from banaserve.cli.main import one_line_errors


def run_script(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run ``main`` on the command line and exit with its code; errors are one line."""
    sys.exit(one_line_errors(main)(sys.argv[1:]))
