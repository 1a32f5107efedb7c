"""``banaserve route`` from its command line to its end."""

from __future__ import annotations

import http.server
import json
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

from balancer_log import without_stalls
from banaserve.cli import main as cli
from banaserve_route.command import parse
from ports import free_port

REPLICA = ["--replica", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "no replica"),
        ([*REPLICA, "--polcy", "x"], "unrecognized arguments: --polcy"),
        ([*REPLICA, "--policy", "round_robbin"], "did you mean round_robin?"),
        ([*REPLICA, "--preset", "pliant"], "unknown preset of policy predicted_latency: pliant"),
        (
            [*REPLICA, "--policy-option", "speed=3"],
            "unknown option of policy predicted_latency: speed",
        ),
        ([*REPLICA, "--policy-option", "speed"], "write KEY=VALUE"),
        ([*REPLICA, *REPLICA], "replica http://127.0.0.1:9 is there twice"),
        (["--replica", "127.0.0.1:9"], "write http://HOST:PORT"),
        (["--replica", "http://127.0.0.1:9/v1"], "has a path"),
        (["--replica", "http://a..b:9"], "write http://HOST:PORT"),
        ([*REPLICA, "--host", "ü..b", "--api-key", "k"], "cannot listen on ü..b:"),
        (["--replica", f"http://{'a' * 64}:9"], "write http://HOST:PORT"),
        (["--replica", "http://u:p@127.0.0.1:9"], "write http://HOST:PORT"),
        (["--replica", "http://127.0.0.1:99999"], "write http://HOST:PORT"),
        ([*REPLICA, "--host", "0.0.0.0"], "lets other machines in"),
        ([*REPLICA, "--host", "192.0.2.1", "--api-key", "k"], "cannot listen on 192.0.2.1"),
        ([*REPLICA, "--max-body-size", "much"], "'much' is not a size"),
        ([*REPLICA, "--queue-timeout", "-1"], "limits.queue_timeout_s is -1.0"),
        ([*REPLICA, "--health-interval", "nan"], "health.interval_s is nan"),
        ([*REPLICA, "--port", "0"], "port is 0"),
        ([*REPLICA, "--api-key", "k\r\nX: y"], "characters that no header may carry"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(argv, line, capfd):
    # Some mistakes are found only when the port is bound.
    assert cli.main(["route", "--port", str(free_port()), *argv]) == cli.EXIT_USER_ERROR
    error = capfd.readouterr().err
    assert line in error
    assert error.startswith("banaserve: ")
    assert error.count("\n") == 1


def test_keys_come_from_the_environment_where_the_line_has_none(monkeypatch):
    monkeypatch.setenv("BANASERVE_API_KEY", "theirs")
    monkeypatch.setenv("BANASERVE_REPLICA_KEY", "ours")
    settings = read_argv(REPLICA)
    assert (settings.api_keys, settings.replica_key) == (("theirs",), "ours")
    assert read_argv([*REPLICA, "--api-key", "k"]).api_keys == ("k",)


def read_argv(argv):
    return parse(argv).settings()


class _Replica(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self._answer(b"{}")

    def do_POST(self):
        self._answer(self.rfile.read(int(self.headers["content-length"])))

    def _answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_the_command_serves_and_ends_cleanly(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Replica)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    port = free_port()
    config = tmp_path / "route.toml"
    # The replica is this process, which may be slow.
    patience = "health = { timeout_s = 60 }\nlimits = { connect_timeout_s = 60, drain_s = 60 }"
    config.write_text(f"port = {port}\nreplicas = [{{ url = '{url}' }}]\n{patience}\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "banaserve", "route", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        shown = []
        for line in process.stdout:
            shown.append(line)
            if "Ctrl-C" in line:
                break
        banner = "".join(shown)
        assert f"{url:<32} ready" in banner
        body = json.dumps({"prompt": "hello"}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.read() == body
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert "ended" in out
        assert without_stalls(err.splitlines()) == []
    finally:
        process.kill()
        process.wait()
        server.shutdown()
        server.server_close()
