"""Commands with policies and tiers of other packages."""

from __future__ import annotations

import http.server
import json
import logging
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.base.plugins import discovery as plugins
from banaserve.base.plugins.discovery import PluginGroup
from banaserve.cli import main as cli
from banaserve.cli.commands import OFFERED_BY
from banaserve.cli.serve.command import serve_command
from banaserve.cli.terminal.completion import candidates
from banaserve.kvstore.client.admin import fetch_stats
from banaserve.kvstore.daemon import process as daemon
from banaserve.kvstore.tiers.registry import TIERS, distributed_tier
from installed_packages import MIGRATION, REPLICAS, TIER, install, plugin_site, routing_plugin
from ports import free_port
from store_process import fork_store

ROUTING_GROUP, REPLICA_GROUP, MIGRATION_GROUP, TIER_GROUP = PluginGroup
EXAMPLES = Path(__file__).parents[2] / "examples"
LACKING = "class Needy: ..."
"""A class without a method of any interface."""


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that packages can be installed to; what they register is forgotten afterwards."""
    with plugin_site(tmp_path / "site", monkeypatch):
        yield tmp_path / "site"


def asked(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "banaserve", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_store_serves_with_the_tier_of_another_package(site: Path, tmp_path: Path) -> None:
    install(site, "acme-tier", TIER, {f"{TIER_GROUP}:heap": "acme_tier:HeapTier"})
    path = tmp_path / "store.sock"
    process = fork_store(path, "1MiB", "--distributed", "heap://here?size=64MiB")
    try:
        (tier,) = fetch_stats(path).tiers
        assert (tier.stats.available, tier.stats.capacity_bytes) == (True, 64 * 2**20)
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_what_is_refused_is_in_the_server_s_log(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routing_plugin(site, package="zeal-routing")
    routing_plugin(site, package="acme-routing")
    argv = ["--model", str(tmp_path / "nowhere"), "--run-dir", str(tmp_path / "run")]
    argv += ["--routing-policy", "by_id", "--kv-store-size", "1MiB", "--port", str(free_port())]
    done = asked("serve", *argv)
    assert done.returncode == cli.EXIT_USER_ERROR
    (log,) = (tmp_path / "run").rglob("front.log")
    for line in (
        "plugin by_id of zeal-routing 1.0 (banaserve.routing_policies) is refused: ",
        "routing policy by_id: that of acme-routing 1.0 is used, that of zeal-routing 1.0 refused",
    ):
        assert line in log.read_text()
        assert line in done.stderr


@pytest.mark.parametrize(
    ("group", "argv", "known"),
    [
        (ROUTING_GROUP, ["serve", "--routing-policy", "x"], "unknown routing policy: x (known: "),
        (REPLICA_GROUP, ["route", "--replica", "http://h:1", "--policy", "x"], "unknown policy: x"),
        (MIGRATION_GROUP, ["serve", "--orchestrator-policy", "x"], "unknown migration policy: x"),
        (TIER_GROUP, ["serve", "--kv-store-distributed", "x://h"], "unknown scheme of a distri"),
    ],
)
def test_asking_for_a_refused_one_says_why(
    site: Path,
    group: PluginGroup,
    argv: list[str],
    known: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install(site, "acme", LACKING, {f"{group}:x": "acme:Needy"})
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"banaserve: plugin x of acme 1.0 ({group}) is refused: Needy lacks")
    assert known in error
    assert "; acme 1.0 offers it and was refused: Needy lacks" in error


def test_a_plugin_is_among_the_known_ones(site: Path) -> None:
    routing_plugin(site)
    with pytest.raises(UserError, match=r"known: by_id, least_requests, .*did you mean by_id\?"):
        serve_command(["--routing-policy", "by_ids"])
    done = asked("serve", "--help=routing")
    words = " ".join(done.stdout.split())
    assert "one of by_id, least_requests, load_aware, round_robin" in words


def test_simulate_runs_with_a_plugin(site: Path) -> None:
    install(site, "acme-moves", MIGRATION, {f"{MIGRATION_GROUP}:lazy": "acme_moves:Lazy"})
    argv = ["alpaca", "--rps", "5", "--duration", "5", "--system", "banaserve", "--json"]
    done = asked("simulate", *argv, "--policy", "lazy")
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)["runs"][0]["systems"]["banaserve"]
    assert (outcome["finished_fraction"], outcome["num_moves"]) == (1.0, 0)


COMMAND = """
def run(argv):
    print("tidied", *argv)
    return 7
"""


def test_a_package_offers_a_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = install(site, "acme", COMMAND, {"banaserve.commands:tidy": "acme:run"})
    with (info / "METADATA").open("a") as metadata:
        metadata.write("Summary: Tidy up.\n")
    assert cli.main(["--help"]) == 0
    assert "  tidy         Tidy up.\n" in capsys.readouterr().out
    assert "acme" not in sys.modules
    assert cli.main(["tidy", "all"]) == 7
    assert capsys.readouterr().out == "tidied all\n"
    assert "tidy" in candidates(["ti"])


def test_a_package_cannot_replace_a_command(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "acme", COMMAND, {"banaserve.commands:version": "acme:run"})
    assert cli.main(["version"]) == 0
    assert "tidied" not in capsys.readouterr().out


@pytest.mark.parametrize("name", OFFERED_BY)
def test_a_command_that_is_not_installed_says_what_to_install(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = OFFERED_BY[name].package
    everything = [one for one in plugins.distributions() if one.metadata["Name"] != package]
    monkeypatch.setattr(plugins, "distributions", lambda: everything)
    assert cli.main([name]) == cli.EXIT_USER_ERROR
    line = f"banaserve: the command {name} is part of {package}: install that package's wheel"
    assert capsys.readouterr().err.startswith(line)


def test_a_tier_that_is_not_installed_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TIERS, "_found", {})
    with pytest.raises(
        UserError, match=r"mooncake \(known: none\); install the wheel of banaserve-mooncake"
    ):
        distributed_tier("mooncake://host:1")


def test_the_doctor_lists_plugins(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing_plugin(site)
    install(site, "acme", LACKING, {f"{TIER_GROUP}:x": "acme:Needy"})
    cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    found = [line for line in lines if line.startswith("plugin") and " of banaserve-" not in line]
    assert len(found) == 2
    assert "by_id of acme-routing 1.0 (banaserve.routing_policies)" in found[0]
    assert "warning" in found[1]
    assert "x of acme 1.0 (banaserve.store_tiers): Needy lacks check" in found[1]


def test_the_daemon_logs_a_refused_tier(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    install(site, "acme", LACKING, {f"{TIER_GROUP}:x": "acme:Needy"})
    argv = ["--socket", str(tmp_path / "s"), "--size", "1MiB", "--distributed", "x://h"]
    with caplog.at_level(logging.WARNING):
        assert daemon.main(argv) == daemon.USER_ERROR_EXIT_CODE
    assert ["is refused: Needy lacks" in record.message for record in caplog.records] == [True]
    assert "acme 1.0 offers it and was refused" in capsys.readouterr().err


class _Named(http.server.BaseHTTPRequestHandler):
    """A replica that answers every request with its own port."""

    def do_GET(self) -> None:
        body = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("url", ["dictionary://", "dictionary://?size=none", "dictionary://?x=1"])
def test_a_url_of_the_example_s_tier_that_makes_no_sense_is_one_line(
    url: str, site: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = (EXAMPLES / "store_tier" / "dictionary_tier.py").read_text()
    scheme = {f"{TIER_GROUP}:dictionary": "dictionary_tier:DictionaryTier"}
    install(site, "dictionary-tier", source, scheme)
    assert cli.main(["kvstore", "--distributed", url]) == cli.EXIT_USER_ERROR
    out, error = capfd.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert "size" in error


def test_a_request_goes_where_a_plugin_decides(site: Path) -> None:
    install(site, "acme-replicas", REPLICAS, {f"{REPLICA_GROUP}:by_id": "acme_replicas:ById"})
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Named) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    ports = sorted((server.server_port for server in servers), key=str)
    command = [sys.executable, "-m", "banaserve", "route", "--policy", "by_id", "--preset", "last"]
    command += ["--port", str(port := free_port())]
    command += [word for one in ports for word in ("--replica", f"http://127.0.0.1:{one}")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        shown = list(iter(lambda: process.stdout.readline(), "  Ctrl-C ends it.\n"))
        assert "  banaserve routes by by_id of acme-replicas 1.0\n" in shown
        for _ in range(3):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as reply:
                assert reply.read() == str(ports[-1]).encode()
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.shutdown()
            server.server_close()
