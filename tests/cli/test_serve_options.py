"""Wrong options of ``banaserve serve``: what is wrong, and what to write, before an engine starts.

``tests/frontdoor/live/test_bad_input.py`` starts the command for what only a process finds out.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from banaserve.base import models
from banaserve.base.errors import UserError
from banaserve.cli import main as cli
from banaserve.cli.serve.command import check_config
from banaserve.cli.serve.command_line import parse_serve_argv

WRONG = [
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
    ("--kv-store-size 10TiB", "with --kv-store-size 10TiB need about 10 TiB of memory"),
    ("--kv-store-size 1kB", "a store of 1kB is too small"),
    ("--kv-store-size many", "'many' is not a size: write a number and a unit, such as 2GiB"),
    ("--max-body-siz 1MiB", "unknown option --max-body-siz; did you mean --max-body-size?"),
    ("--prot 9000", "unknown option --prot; did you mean --port?"),
    ("--api-kye=secret", "unknown option --api-kye; did you mean --api-key?"),
    ("--prot=9000", "did you mean --port?"),
    ("--kv_store_size 1GiB", "did you mean --kv-store-size?"),
    ("--routing-policy load", "unknown routing policy: load (known: least_requests,"),
    ("--routing-option presets=x", "did you mean preset?"),
    ("--migration-attention flash-infer", "did you mean flashinfer?"),
    ("--config /nowhere.toml", "--config /nowhere.toml: No such file"),
]


def test_options_that_are_right_pass() -> None:
    check_config(parse_serve_argv(["--pd", "1:1", "--kv-store-size", "1MiB"]))


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[options for options, _ in WRONG])
def test_a_wrong_option_is_refused(options: str, words: str) -> None:
    refused_with(options, words)


@pytest.mark.parametrize("table", ["[[node]]\nkey = 'a'", "[node]\nkey = 'a'", "node = [[1]]"])
def test_a_configuration_holds_values_and_lists_of_them(table: str, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(table)
    refused_with(f"--config {tmp_path}/c.toml", "is neither a value nor a list of values")


def refused_with(options: str, words: str) -> None:
    with pytest.raises(UserError) as refused:
        check_config(parse_serve_argv(options.split()))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("options", ["--pd 0:1", "--kv-store-size 10TiB"])
def test_the_command_says_it_in_one_line_before_it_listens(
    options: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        # A command that went on would say that this port is taken.
        port = taken.getsockname()[1]
        code = cli.main(["serve", "--port", str(port), *options.split()])
    assert code == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("banaserve: ")
    assert options in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "--max-modl-len 64",
            "unrecognized arguments: --max-modl-len; did you mean --max-model-len",
        ),
        ("--dtype float7", "--dtype: invalid choice: 'float7' (choose from"),
    ],
)
def test_an_option_of_vllm_is_refused_too(options: str, words: str) -> None:
    from banaserve.engine.engine_args import parse_vllm_argv

    config = parse_serve_argv(["--", *options.split()])
    assert config.vllm_argv == tuple(options.split())
    with pytest.raises(UserError) as refused:
        parse_vllm_argv(list(config.vllm_argv))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


# Models -------------------------------------------------------------------------------------------


def resolved(name: str) -> str:
    """What is said of a model that cannot be had."""
    with pytest.raises(UserError) as refused:
        models.resolve(name, None, print)
    return str(refused.value)


def test_a_model_folder_that_is_none(tmp_path: Path) -> None:
    assert "there is no folder /nowhere: give a folder" in resolved("/nowhere")
    assert "holds no config.json" in resolved(str(tmp_path))


@pytest.fixture
def hub_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``hub_at(url)`` has models fetched from there, with nothing in the hub's own cache."""

    def use(url: str) -> None:
        for name, value in {
            "ENDPOINT": url,
            "HF_HUB_CACHE": str(tmp_path),
            "HF_HUB_ETAG_TIMEOUT": 1,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)

    return use


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("facebook/opt-125m", "cannot fetch facebook/opt-125m from http://127.0.0.1:9: give a"),
        ("opt-13b", "cannot fetch facebook/opt-13b from"),
        ("smolm2-135m", "did you mean smollm2-135m?"),
    ],
)
def test_a_hub_model_without_a_network(
    name: str, words: str, hub_at: Callable[[str], None]
) -> None:
    hub_at("http://127.0.0.1:9")  # a port of this machine where nothing listens
    assert words in resolved(name)


def test_a_hub_that_never_answers(hub_at: Callable[[str], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        hub_at(endpoint)
        line = resolved("facebook/opt-125m")
    assert f"cannot fetch facebook/opt-125m from {endpoint}: give a local folder" in line


def test_a_damaged_model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models.resolve(models.PACKAGED, None, print)
    whole = models.packaged_folder()
    copy = models.packaged_folder(tmp_path)
    shutil.copytree(whole, copy)
    os.truncate(copy / "model.safetensors", 1000)
    monkeypatch.setenv("BANASERVE_CACHE", str(tmp_path))
    assert resolved(models.PACKAGED) == (
        f"the model cache {copy} is damaged (model.safetensors): remove it with "
        f"`rm -r {copy}` and start again"
    )
