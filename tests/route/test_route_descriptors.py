"""``banaserve route`` with few file descriptors, besieged by clients without a key."""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ports import free_port
from waiting import DEADLINE_S, eventually

HARD_LIMIT = 160
NUM_SILENT = 600
FIRST, SECOND = b"data: 1\n\n", b"data: 2\n\n"


class Replica(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    may_go_on = threading.Event()

    def do_GET(self) -> None:
        self._begin("Content-Length: 2")
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/v1/stream":
            self.do_GET()
            return
        self._begin("Transfer-Encoding: chunked")
        self.wfile.write(b"%x\r\n%b\r\n" % (len(FIRST), FIRST))
        self.wfile.flush()
        self.may_go_on.wait(DEADLINE_S)
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(SECOND), SECOND))

    def _begin(self, framing: str) -> None:
        self.send_response(200)
        self.send_header(*framing.split(": "))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


def few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (HARD_LIMIT // 2, HARD_LIMIT))


def test_idle_connections_make_no_replica_dead(tmp_path: Path) -> None:
    replica = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    threading.Thread(target=replica.serve_forever, daemon=True).start()
    port = free_port()
    config = tmp_path / "route.toml"
    # The replica is this process, which may be slow.
    patience = "limits = { connect_timeout_s = 60 }\nhealth = { interval_s = 0.1, timeout_s = 60 }"
    url = f"http://127.0.0.1:{replica.server_port}"
    config.write_text(
        f"port = {port}\napi_keys = ['good']\n{patience}\nreplicas = [{{ url = '{url}' }}]\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "banaserve", "route", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=few_descriptors,
    )
    assert process.stdout is not None
    shown: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(replica.server_close)
        stack.callback(replica.shutdown)
        stack.callback(process.wait)
        stack.callback(process.kill)
        stack.callback(Replica.may_go_on.set)
        for line in process.stdout:
            shown.append(line)
            if "Ctrl-C" in line:
                break
        threading.Thread(target=lambda: shown.extend(process.stdout or ()), daemon=True).start()
        url = f"http://127.0.0.1:{port}"
        key = {"Authorization": "Bearer good"}

        def ask(path: str) -> urllib.request.Request:
            return urllib.request.Request(f"{url}{path}", b"{}", key)

        stream = stack.enter_context(urllib.request.urlopen(ask("/v1/stream"), timeout=DEADLINE_S))
        assert stream.read(len(FIRST)) == FIRST
        for _ in range(NUM_SILENT):
            silent = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
            stack.enter_context(silent)

        def page() -> str:
            with urllib.request.urlopen(f"{url}/metrics", timeout=DEADLINE_S) as answer:
                return str(answer.read().decode())

        eventually(lambda: 'dropped_total{cause="connections"}' in page())
        for _ in range(10):
            with urllib.request.urlopen(ask("/v1/completions"), timeout=DEADLINE_S) as answer:
                assert answer.read() == b"{}"
        [healthy] = [line for line in page().splitlines() if "target_healthy{" in line]
        [opened] = [line for line in page().splitlines() if "circuit_opened_total{" in line]
        assert (healthy.split()[1], opened.split()[1]) == ("1.0", "0.0")
        Replica.may_go_on.set()
        assert stream.read() == SECOND
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
    said = "".join(shown)
    assert "connections of clients at most: file descriptors (ulimit -n) allow no more" in said
    assert "does not answer" not in said
