"""Which running server a command talks to, with which key, and whose certificate it trusts."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.request import HTTPRedirectHandler, Request

import pytest

from banaserve.base.platform.run_dir import AdminAccess, open_run_dir, write_admin
from banaserve.cli.main import main
from banaserve.frontdoor.admin_client import RedirectHandler, ServerApi
from certificates import write_certificate

KEY = "of-this-server"


class Answers(BaseHTTPRequestHandler):
    """The admin API of a server that has decided nothing."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == f"Bearer {KEY}"
        body = b"[]" if is_known and self.path.startswith("/admin/decisions") else b"{}"
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


Listen = Callable[[Path | None], int]


@pytest.fixture
def listen(stack: ExitStack) -> Listen:
    def listening(folder: Path | None) -> int:
        """Port of a new server, with a certificate in ``folder`` if there is one."""
        server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Answers))
        if folder is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*write_certificate(folder))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        return int(server.server_address[1])

    return listening


@pytest.fixture(autouse=True)
def _no_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("BANASERVE_ADMIN_KEY", raising=False)


def run_of(stack: ExitStack, folder: Path, access: AdminAccess) -> Path:
    run = stack.enter_context(open_run_dir(folder))
    write_admin(run.logs, access)
    return folder


def test_one_of_several_servers_is_named_by_its_port(
    listen: Listen, stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run_dir(None) as run:
        where = run.logs.parent
    ports = sorted(listen(None) for _ in range(2))
    for port in ports:
        folder = where / f"20260101-000000-{port}"
        folder.mkdir()
        run_of(stack, folder, AdminAccess(f"http://127.0.0.1:{port}", KEY))
    assert main(["decisions"]) == 2
    listed = f"{ports[0]}, {ports[1]}"
    assert f"several run: choose one with --port ({listed})" in capsys.readouterr().err
    assert main(["decisions", "--port", str(ports[1])]) == 0
    assert main(["decisions", "--port", "1"]) == 2
    assert f"serves on port 1 (others: {listed})" in capsys.readouterr().err
    assert main(["decisions", "--port", "1", "--url", "http://127.0.0.1:1"]) == 2
    assert "--port and --url both name a server" in capsys.readouterr().err


def test_the_certificate_of_the_users_own_run_is_trusted(
    listen: Listen, stack: ExitStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listen(tmp_path)
    url, certificate = f"https://127.0.0.1:{port}", str(tmp_path / "cert.pem")
    folder = run_of(stack, tmp_path / "run", AdminAccess(url, KEY, certificate))
    assert main(["decisions", "--run-dir", str(folder)]) == 0
    (tmp_path / "other").mkdir()
    other, _ = write_certificate(tmp_path / "other", serial=2)
    write_admin(folder, AdminAccess(url, KEY, str(other)))
    capsys.readouterr()
    assert main(["decisions", "--run-dir", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "CERTIFICATE_VERIFY_FAILED" in said
    assert len(said.strip().splitlines()) == 1
    write_admin(folder, AdminAccess(url, KEY, str(tmp_path / "gone.pem")))
    assert main(["decisions", "--run-dir", str(folder)]) == 2
    assert "gone.pem: No such file" in capsys.readouterr().err


def test_a_server_by_its_url_needs_its_key_and_certificate(
    listen: Listen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listen(tmp_path)
    (key := tmp_path / "key").write_text(f"{KEY}\n")
    key.chmod(0o600)
    named = (
        "decisions",
        "--url",
        f"https://localhost:{port}",
        "--cacert",
        str(tmp_path / "cert.pem"),
    )
    assert main([*named, "--admin-key-file", str(key)]) == 0
    assert main([*named, "--admin-key", "another"]) == 2
    assert "refuses the admin key" in capsys.readouterr().err
    assert main([*named]) == 2
    assert "refuses the admin key" in capsys.readouterr().err
    assert main(["decisions", "--cacert", str(key)]) == 2
    assert "--cacert is for --url" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "chat", "ui"])
def test_without_a_server_only_options_of_the_command_are_named(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 2
    told = set(re.findall(r"--[a-z-]+", capsys.readouterr().err))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert {"--run-dir"} <= told <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def test_one_that_is_dead_is_said_to_be_dead(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert main(["decisions", "--url", url]) == 2
    assert f"no banaserve answers at {url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "is_shown"),
    [
        ("https://a:1/b", True),
        ("https://b:1/", False),
        ("https://a:2/", False),
        ("http://a:1/", False),
    ],
)
def test_a_redirect_shows_the_key_to_no_other_server(place: str, is_shown: bool) -> None:
    asked = Request("https://a:1/admin/status", headers={"Authorization": f"Bearer {KEY}"})
    found = RedirectHandler().redirect_request(asked, None, 302, "Found", {}, place)
    assert found is not None
    assert found.has_header("Authorization") is is_shown


def test_redirects_of_a_server_are_followed_so() -> None:
    handlers = ServerApi("https://a:1", KEY)._opener.handlers  # type: ignore[attr-defined]
    redirecting = [one for one in handlers if isinstance(one, HTTPRedirectHandler)]
    assert [type(one) for one in redirecting] == [RedirectHandler]
