"""Paths that cannot be used, in options of commands: one line that names them, and exit code 2."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from banaserve.cli import kvstore
from banaserve.cli.main import main
from ports import free_port

HTTP = ("--url", "http://127.0.0.1:9")
HTTPS = ("--url", "https://127.0.0.1:9")
NO_FOLDERS = "/proc/nothing"
"""In a file system in which nobody, root included, can make a folder."""
REPLICA = ("--replica", "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command sets up the logging of its process, which other tests share."""
    loggers = [logging.getLogger(name) for name in ("", "banaserve")]
    before = [(one.level, list(one.handlers)) for one in loggers]
    yield
    for one, (level, handlers) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers[:] = handlers


@pytest.mark.parametrize("kind", ["missing", "a folder", "below a file"])
@pytest.mark.parametrize(
    ("command", "option", "more"),
    [
        ("chat", "--api-key-file", HTTP),
        ("chat", "--cacert", HTTPS),
        ("chat", "--run-dir", ("hi",)),
        ("node", "--cluster-key-file", ("--listen", "127.0.0.1:0")),
        ("doctor", "--cluster-key-file", ("--node", "127.0.0.1:9")),
        ("kvstore check", "--ssd", ()),
        ("kvstore clear", "--socket", ()),
        ("kvstore", "--peer-key-file", ("--listen", "127.0.0.1:0")),
        ("status", "--run-dir", ()),
        ("status", "--admin-key-file", HTTP),
        ("status", "--cacert", HTTPS),
        ("migrate return", "--run-dir", ("--from", "p0")),
        ("nodes list", "--run-dir", ()),
        ("trace", "--run-dir", ()),
        ("ui", "--run-dir", ()),
        ("ui", "--replay", ()),
        ("route", "--config", ()),
        ("route", "--api-key-file", REPLICA),
        ("route", "--replica-key-file", REPLICA),
        ("route", "--replica-ca", REPLICA),
        ("route", "--ssl-certfile", REPLICA),
        ("route", "--decision-log", REPLICA),
        ("simulate", "--chrome-trace", ("bursts", "--system", "static")),
        ("simulate", "--decision-log", ("bursts", "--system", "banaserve")),
        ("kvstore status", "--socket", ()),
        ("serve", "--config", ()),
        ("serve", "--tenants", ()),
        ("serve", "--api-key-file", ()),
        ("serve", "--admin-key-file", ()),
        ("serve", "--cluster-key-file", ("--node", "127.0.0.1:9")),
        ("serve", "--kv-store-peer-key-file", ("--kv-store-peer", "127.0.0.1:9")),
    ],
)
def test_a_path_that_cannot_be_used_is_one_line(
    command: str,
    option: str,
    more: Sequence[str],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("x")
    paths = {"missing": "nothing/there", "a folder": ".", "below a file": "file/there"}
    path = str(tmp_path / paths[kind])
    refused(capsys, path, *command.split(), option, path, *more)


@pytest.mark.parametrize("kind", ["a file", "below a file", "no room for files", "too long"])
@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("kvstore --ssd", ("--size", "1MiB")),
        ("node --run-dir", ("--listen", "127.0.0.1:0")),
        ("bench report", ()),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_line(
    command: str,
    more: Sequence[str],
    kind: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BANASERVE_CLUSTER_KEY", "k" * 32)
    (tmp_path / "file").write_text("x")
    paths = {"a file": "file", "below a file": "file/there", "too long": "x" * 300}
    path = NO_FOLDERS if kind not in paths else str(tmp_path / paths[kind])
    refused(capsys, path, *command.split(), path, *more)


@pytest.mark.parametrize(
    "argv",
    [("simulate",), ("serve", "--port", str(free_port()), "--model"), ("doctor", "--model")],
)
def test_a_name_that_no_file_can_have_is_one_line(
    argv: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / ("x" * 300))
    refused(capsys, path, *argv, path)


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "/dev/full", "simulate", "bursts", "--chrome-trace", "/dev/full")


def test_a_disk_that_fills_up_under_a_decision_log_is_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The simulation has ended by then: its results are shown all the same."""
    options = ("--system", "banaserve", "--decision-log", "/dev/full")
    assert main(["simulate", "bursts", *options]) == 2
    printed = capsys.readouterr()
    assert "banaserve" in printed.out
    assert printed.err.splitlines()[-1].endswith("/dev/full is incomplete: No space left on device")


def test_a_full_disk_under_a_command_that_has_begun_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_the_disk(*_: object) -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    monkeypatch.setattr(kvstore, "fetch_stats", fills_the_disk)
    refused(capsys, "no room left", "kvstore", "status")


def refused(capsys: pytest.CaptureFixture[str], word: str, *argv: str) -> None:
    """Asserts that the command is refused in one line with ``word``."""
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("banaserve: ")
    assert error.count("\n") == 1
    assert word in error
