"""Output of libraries and child processes, redirected from the terminal to a log."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def quiet(log_path: Path) -> Iterator[TextIO]:
    """Send vLLM's output to a log; yield the terminal for our own output."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # A library that vLLM's server imports sets the root logger to errors only.
    logging.getLogger("banaserve").setLevel(logging.INFO)
    terminal = os.fdopen(saved_out, "w", buffering=1)
    atexit.register(_hush)
    try:
        yield terminal
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        terminal.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_err)


def _hush() -> None:
    """Discard standard error at exit: native libraries that vLLM loads report their leaks there."""
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
