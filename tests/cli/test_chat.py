"""``banaserve chat``: what is asked, what is shown, and one line where it cannot be."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import urlsplit

import pytest

from banaserve.base.errors import UserError
from banaserve.base.platform.run_dir import AdminAccess, open_run_dir, write_admin
from banaserve.cli.admin.chat import pieces
from banaserve.cli.main import main

KEY = "of-the-tenant"


class Model(BaseHTTPRequestHandler):
    """An OpenAI API whose model says the last message backwards, word by word."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "backwards"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.headers["Authorization"] != f"Bearer {KEY}":
            self._answer(401, b"{}")
            return
        if body.get("max_tokens") == 0:
            self._answer(400, json.dumps({"error": {"message": "max_tokens is 0"}}).encode())
            return
        if body.get("max_tokens") == 1:
            self._answer(400, b'{"error": {"message": "\xff"}}')
            return
        words = body["messages"][-1]["content"].split()[::-1]
        texts = [words[0], *(f" {word}" for word in words[1:])]
        events = [{"choices": [{"delta": {"content": text}}]} for text in texts]
        lines = [b"data: " + json.dumps(event).encode() for event in events]
        self._answer(200, b"\n\n".join([*lines, b"data: [DONE]\n\n"]))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        Model.asked = []
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def test_one_question_is_answered(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BANASERVE_API_KEY", KEY)
    assert main(["chat", "one two three", "--url", url, "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == "three two one\n"
    (asked,) = Model.asked
    assert asked == {
        "model": "backwards",
        "temperature": 0.0,
        "stream": True,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one two three"},
        ],
    }


def test_an_answer_controls_no_terminal(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["chat", "b\x1b[2J a\x9b\u200d\u00e9", "--url", url, "--api-key", KEY]
    assert main(said) == 0
    assert capsys.readouterr().out == "a\x9b\u200d\u00e9 b\x1b[2J\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(said) == 0
    assert capsys.readouterr().out == "a\u200d\u00e9 b[2J\n"


def test_a_conversation_keeps_what_was_said(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a b\nc d\n\nnot asked\n"))
    assert main(["chat", "--url", url, "--api-key", KEY, "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == "b a\nd c\n"
    first, second = Model.asked
    assert first["temperature"] == 0.5
    assert [one["content"] for one in second["messages"]] == ["a b", "b a", "c d"]


def test_what_cannot_be_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "x", "--url", url]) == 2
    assert "refuses the API key" in capsys.readouterr().err
    assert main(["chat", "x", "--url", url, "--api-key", KEY, "--max-tokens", "0"]) == 2
    assert capsys.readouterr().err == "banaserve: max_tokens is 0\n"
    assert main(["chat", "x", "--url", url, "--api-key", KEY, "--max-tokens", "1"]) == 2
    assert capsys.readouterr().err == "banaserve: the server answers 400 Bad Request\n"
    assert main(["chat", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
    assert main(["chat", "x", "--url", "nonsense"]) == 2
    assert "no server answers at nonsense" in capsys.readouterr().err


def test_a_port_is_enough_where_the_folder_of_the_run_is_not_known(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = str(urlsplit(url).port)
    assert main(["chat", "a b", "--port", port, "--api-key", KEY]) == 0
    assert capsys.readouterr().out == "b a\n"
    assert main(["chat", "a b", "--port", "1"]) == 2
    assert "no server answers at http://127.0.0.1:1 (" in (line := capsys.readouterr().err)
    assert "give its --run-dir" in line
    assert main(["chat", "a b", "--port", port, "--url", url]) == 2
    assert "--port and --url both name a server" in capsys.readouterr().err


def test_the_folder_of_a_run_names_its_server(
    url: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with open_run_dir(tmp_path / "run") as run:
        write_admin(run.logs, AdminAccess(url.removesuffix("/v1"), "admin"))
        assert main(["chat", "a b", "--run-dir", str(run.logs), "--api-key", KEY]) == 0
    assert capsys.readouterr().out == "b a\n"


def test_an_error_in_a_stream_is_told() -> None:
    text, error = b'{"choices":[{"delta":{"content":"a"}}]}', b'{"error":{"message":"b"}}'
    found = pieces([b"data: " + text, b"\n", b"data: " + error])
    assert next(found) == "a"
    with pytest.raises(UserError, match="broke off: b"):
        next(found)


def test_a_stream_that_ends_early_has_broken_off() -> None:
    found = pieces([b'data: {"choices":[{"delta":{"content":"a"}}]}'])
    assert next(found) == "a"
    with pytest.raises(UserError, match="broke off: the server has closed"):
        next(found)
