"""A server none of whose engines comes back ends with an error, so that it can be started anew."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable

import pytest

from observing import until, writers
from server_run import Run

pytestmark = pytest.mark.e2e


def test_a_server_whose_engine_never_comes_back_ends_with_an_error(
    serve: Callable[..., Run],
) -> None:
    run = serve("--colocated", "1")
    is_over = threading.Event()

    def kill_each() -> None:
        """Each engine as soon as it is there, as if it died of its start."""
        killed: set[int] = set()
        while not is_over.wait(0.02):
            for log, pid in writers(run.run_dir):
                if log == "c0.log" and pid not in killed:
                    killed.add(pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    killing = threading.Thread(target=kill_each)
    killing.start()
    try:
        until(run.is_gone, "every process of the server has ended")
    finally:
        is_over.set()
        killing.join()
    assert run.process.returncode == 1
    (line,) = run.errors.read_text().splitlines()
    assert "no instance can be started again, and all have been given up" in line
    assert "instance c0 ended while starting" in line
    run.check_nothing_left()
