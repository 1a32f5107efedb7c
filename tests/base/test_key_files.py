"""Keys from files, and options that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.base.access.key_files import read_keys
from banaserve.base.errors import UserError
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve_route import command as route
from banaserve_route.balancer.config import BalancerSettings


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("API", "ADMIN", "METRICS"):
        monkeypatch.delenv(f"BANASERVE_{name}_KEY", raising=False)


def written(folder: Path, said: bytes) -> Path:
    path = folder / "keys"
    path.write_bytes(said)
    return path


@pytest.mark.parametrize(
    ("said", "keys"),
    [
        (b"k1", ("k1",)),
        (b"k1\n", ("k1",)),
        (b"# of the team\n  k1  \r\n\nk2\n", ("k1", "k2")),
    ],
)
def test_a_file_holds_a_key_a_line(said: bytes, keys: tuple[str, ...], tmp_path: Path) -> None:
    assert read_keys("--x", written(tmp_path, said)) == keys


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (b"", "holds no key"),
        (b"# nothing\n", "holds no key"),
        (b"a key\n", "without spaces"),
        ("kéy".encode(), "ASCII"),
        (b"k\n" * 2**20, "without spaces"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(said: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^--x .*{words}"):
        read_keys("--x", written(tmp_path, said))
    with pytest.raises(UserError, match=r"^--x .*No such file"):
        read_keys("--x", tmp_path / "none")


def test_options_of_serve_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, b"secret")
    words = ["--api-key-file", str(file), "--api-key", "other"]
    assert parse_serve_argv(words).api_keys == ("other", "secret")
    assert parse_serve_argv(["--admin-key-file", str(file)]).admin_key == "secret"
    assert parse_serve_argv(["--metrics-key-file", str(file)]).metrics_key == "secret"
    monkeypatch.setenv("BANASERVE_METRICS_KEY", "m")
    monkeypatch.setenv("BANASERVE_API_KEY", "a")
    config = parse_serve_argv([])
    assert (config.metrics_key, config.api_keys) == ("m", ("a",))
    with pytest.raises(UserError, match="exclude each other"):
        parse_serve_argv(["--admin-key", "k", "--admin-key-file", str(file)])
    with pytest.raises(UserError, match=r"--admin-key-file .*holds 2 keys"):
        parse_serve_argv(["--admin-key-file", str(written(tmp_path, b"k1\nk2"))])


def test_options_of_route_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BANASERVE_REPLICA_KEY", raising=False)
    file = written(tmp_path, b"secret")

    def settings(*words: str) -> BalancerSettings:
        return route.parse(words).settings()

    made = settings("--api-key-file", str(file), "--replica-key-file", str(file))
    assert (made.api_keys, made.replica_key) == (("secret",), "secret")
    assert (settings().api_keys, settings().replica_key) == ((), "")
    assert settings("--replica-key", "k").replica_key == "k"
    with pytest.raises(UserError, match="exclude each other"):
        settings("--replica-key", "k", "--replica-key-file", str(file))
