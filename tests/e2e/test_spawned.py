"""Engines started from nothing, as on GPUs: no secret is shown, and none outlives its server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from observing import until, writer
from server_run import Run

pytestmark = pytest.mark.e2e

SALT = "a-salt-that-is-secret"


def test_a_spawned_engine_shows_no_secret_and_ends_with_its_server(
    serve: Callable[..., Run],
) -> None:
    run = serve("--colocated", "1", "--engine-start", "spawn", "--kv-store-salt", SALT)
    asked = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 4}
    assert run.post("/v1/completions", asked).status_code == 200
    children = [one for one in run.processes() if one.pid != run.process.pid]
    assert writer(run.run_dir, "c0") in [one.pid for one in children]
    assert not any(SALT in word for one in children for word in one.cmdline())
    os.kill(run.process.pid, signal.SIGKILL)
    until(run.is_gone, "every process of the server has ended")
    assert not any(psutil.pid_exists(one.pid) and one.is_running() for one in children)
