"""A user's mistake gives one line that says what to do, exit code 2, and leaves nothing running."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from banaserve import models

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[3]
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
        ("--pd 0:1", "--pd 0:1: write the number of prefill and of decode instances, such as 1:1"),
        ("--pd 1", "--pd 1: write"),
        ("--pd a:b", "--pd a:b: write"),
        ("--pd 1:1 --colocated 2", "--pd and --colocated exclude each other"),
        (
            "--colocated 2 --prefill-tensor-parallel-size 2",
            "give --pd P:D, or --tensor-parallel-size",
        ),
        ("--colocated -1", "--colocated -1: must not be negative"),
        ("--no-kv-store --pd 1:1", "--no-kv-store needs --colocated N"),
        ("--scheduler prebel", "--scheduler: invalid choice: 'prebel'"),
        ("--host 0.0.0.0", "set --api-key KEY"),
        ("--host 0.0.0.0 --api-key=", "--api-key is empty"),
        ("--port 99999", "--port 99999: must be between 1 and 65535"),
        ("--kv-store-size 10TiB", "--kv-store-size 10TiB: "),
        ("--kv-store-size many", "'many' is not a size: write a number and a unit, such as 2GiB"),
        ("--max-body-siz 1MiB", "unknown option --max-body-siz; did you mean --max-body-size?"),
        ("--routing-policy load", "unknown routing policy: load (known: least_requests,"),
        ("--routing-option presets=x", "did you mean preset?"),
        ("--config /nowhere.toml", "--config /nowhere.toml: "),
        ("--model /nowhere", "there is no folder /nowhere: give a folder"),
    ],
)
def test_a_wrong_option_is_refused_at_once(options, words, refused):
    assert words in refused(*options.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--max-modl-len 64",
            "unrecognized arguments: --max-modl-len; did you mean --max-model-len",
        ),
        pytest.param(
            *("-- --dtype float7", "--dtype: invalid choice: 'float7' (choose from"),
            marks=pytest.mark.long,
        ),
        ("--pd 999:999", "1998 instances need about"),
    ],
)
def test_what_needs_vllm_to_find_out_is_refused_too(options, words, refused):
    assert words in refused("--model", models.PACKAGED, *options.split())


# Models -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("facebook/opt-125m", "cannot fetch facebook/opt-125m from http://127.0.0.1:9: give a"),
        ("opt-13b", "cannot fetch facebook/opt-13b from"),
        ("smolm2-135m", "did you mean smollm2-135m?"),
    ],
)
def test_a_hub_model_without_a_network(name, words, refused, tmp_path):
    assert words in refused("--model", name, env={**NO_NETWORK, "HF_HOME": str(tmp_path)})


def test_a_hub_that_never_answers(refused, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env = {**NO_NETWORK, "HF_ENDPOINT": endpoint, "HF_HUB_ETAG_TIMEOUT": "1"}
        line = refused("--model", "facebook/opt-125m", env={**env, "HF_HOME": str(tmp_path)})
    assert f"cannot fetch facebook/opt-125m from {endpoint}: give a local folder" in line


def test_a_folder_that_holds_no_model(refused, tmp_path):
    assert "holds no config.json" in refused("--model", str(tmp_path))


def test_a_damaged_model_cache(refused, tmp_path):
    models.resolve(models.PACKAGED, None, print)
    whole = models.packaged_folder()
    copy = models.packaged_folder(tmp_path)
    shutil.copytree(whole, copy)
    os.truncate(copy / "model.safetensors", 1000)
    line = refused("--model", models.PACKAGED, env={"BANASERVE_CACHE": str(tmp_path)})
    assert line == (
        f"the model cache {copy} is damaged (model.safetensors): remove it with "
        f"`rm -r {copy}` and start again"
    )


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


def test_an_unsupported_python(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit\nexit 1\n')
    python.chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / "requirements" / "install.sh", "venv", python], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"make install: needs Python 3.11, 3.12 or 3.13, but {python} is Python 3.9.2; "
        "name another in PYTHON\n"
    )
