"""Paths that cannot be used, in options of commands: one line that names them, and exit code 2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from banaserve.cli.main import main

HTTP = ("--url", "http://127.0.0.1:9")
HTTPS = ("--url", "https://127.0.0.1:9")


@pytest.mark.parametrize("kind", ["missing", "a folder", "below a file"])
@pytest.mark.parametrize(
    ("command", "option", "more"),
    [
        ("chat", "--api-key-file", HTTP),
        ("chat", "--cacert", HTTPS),
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
        ("route", "--api-key-file", ("--replica", "http://127.0.0.1:9")),
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
    assert main([*command.split(), option, path, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("banaserve: ")
    assert error.count("\n") == 1
    assert path in error
