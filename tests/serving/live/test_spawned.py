"""Engines started from nothing, as on GPUs: no secret is shown, and none outlives its server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from banaserve.base.platform.huge_pages import are_offered
from banaserve.base.platform.processes import is_running
from observing import huge_page_bytes, until, writer
from server_run import Run

pytestmark = pytest.mark.e2e

WEIGHTS_BYTES = 135_000_000 * 2
"""In bfloat16, the smaller of the types that the server may choose."""
SALT = "a-salt-that-is-secret"


def test_a_spawned_engine_shows_no_secret_and_ends_with_its_server(
    serve: Callable[..., Run],
) -> None:
    run = serve("--colocated", "1", "--engine-start", "spawn", "--kv-store-salt", SALT)
    asked = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 4}
    assert run.post("/v1/completions", asked).status_code == 200
    children = [one for one in run.processes() if one.pid != run.process.pid]
    assert writer(run.run_dir, "c0") in [one.pid for one in children]
    assert huge_page_bytes(writer(run.run_dir, "c0")) > WEIGHTS_BYTES or not are_offered()
    assert not any(SALT in word for one in children for word in one.cmdline())
    os.kill(run.process.pid, signal.SIGKILL)
    until(run.is_gone, "every process of the server has ended")
    until(lambda: not any(is_running(one.pid) for one in children), "they too")
