"""A server of OpenAI's API that gives canned answers at once, right or wrong ones."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class CannedOpenAi(ThreadingHTTPServer):
    """Server with one model.

    Attributes:
        key: API key; empty for none.
        metrics: Page of metrics.
        answer: Status and body of every completion; None for as many tokens as are asked for.
        bodies: Bodies of all completions, in the order of their arrival.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.key = ""
        self.metrics = b""
        self.answer: tuple[int, bytes] | None = None
        self.bodies: list[dict[str, Any]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def canned_openai() -> Iterator[CannedOpenAi]:
    """Run a server until the block ends."""
    server = CannedOpenAi()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


def tokens(number: int, usage: dict[str, int] | None) -> bytes:
    """Return a stream of ``number`` tokens."""
    events = [{"choices": [{"text": "x", "token_ids": [7]}]} for _ in range(number)]
    last = [] if usage is None else [{"choices": [], "usage": usage}]
    lines = [f"data: {json.dumps(event)}\n\n" for event in (*events, *last)]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


class _Handler(BaseHTTPRequestHandler):
    server: CannedOpenAi
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(200, self.server.metrics)
        elif self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            self._send(401, b"{}")
        else:
            card = {"id": "canned", "max_model_len": 4096, "root": "/nowhere"}
            self._send(200, json.dumps({"data": [card]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.answer is not None:
            self._send(*self.server.answer)
            return
        number = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": number}
        self._send(200, tokens(number, usage))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...
