"""A server none of whose engines comes back ends with an error, so that it can be started anew."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from mock_facts import MockOptions, Trouble
from mock_run import MockRun
from observing import until, writer

pytestmark = pytest.mark.room


def test_a_server_whose_engine_never_comes_back_ends_with_an_error(
    serve: Callable[..., MockRun],
) -> None:
    run = serve("--colocated", "1")
    run.set_mocks(MockOptions(troubles=(Trouble("fail at start"),)))
    os.kill(writer(run.run_dir, "c0"), signal.SIGKILL)
    until(run.is_gone, "every process of the server has ended")
    assert run.process.returncode == 1
    (line,) = run.errors.read_text().splitlines()
    assert "no instance can be started again, and all have been given up" in line
    assert "instance c0 ended while starting" in line
    run.check_nothing_left()
