"""A user's mistake gives one line that says what to do, exit code 2, and leaves nothing running.

Wrong options are refused without a process in ``tests/cli/test_serve_options.py``.
"""

from __future__ import annotations

import fcntl
import socket

import pytest

from banaserve.base import models

pytestmark = pytest.mark.e2e

# A port of this machine where nobody listens: a hub that cannot be reached, found out at once.
NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}


@pytest.fixture
def refused(launch, poll):
    """Runs ``banaserve serve`` with the given options and returns the line that it ends with."""

    def run(*options: str, **how: object) -> str:
        started = launch(*options, **how)
        poll(lambda: started.process.poll() is not None, "it has ended", 120)
        errors = started.errors.read_text()
        assert started.process.returncode == 2, errors
        assert errors.startswith("banaserve: "), errors
        assert errors.count("\n") == 1, errors
        assert started.processes() == []
        started.check_nothing_left()
        return errors.removeprefix("banaserve: ").strip()

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--model /nowhere", "there is no folder /nowhere: give a folder"),
        (
            "--max-modl-len 64",
            "unrecognized arguments: --max-modl-len; did you mean --max-model-len",
        ),
        ("--pd 999:999", "1998 instances with --kv-store-size 1GiB need about"),
    ],
)
def test_what_is_found_out_on_the_way_ends_it(options, words, refused):
    model = () if "--model" in options else ("--model", models.PACKAGED)
    assert words in refused(*model, *options.split())


def test_a_hub_model_without_a_network(refused, tmp_path):
    line = refused("--model", "facebook/opt-125m", env={**NO_NETWORK, "HF_HOME": str(tmp_path)})
    assert "cannot fetch facebook/opt-125m from http://127.0.0.1:9: give a" in line


# The machine --------------------------------------------------------------------------------------


def test_a_port_that_is_taken(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused(port=port)
    assert f"cannot listen on 127.0.0.1:{port}" in line
    assert "choose another --port" in line


def test_a_run_directory_that_is_in_use(refused, tmp_path):
    with (tmp_path / "run.json").open("w") as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        line = refused("--run-dir", str(tmp_path))
    assert "is in use by another banaserve: choose another" in line
