"""``serve`` over three hosts: front door, prefill and decode each on one, real engines, faults."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import hosts
import small_model
from banaserve.api.admin_client import AdminClient
from banaserve.engine.vllm.migration.api import MoveLayers, Return
from banaserve.nodes.options import KEY_VARIABLE
from banaserve.run_dir import find_admin
from depth import IS_LONG
from hosts import Host, Network
from node_run import NodeRun
from observing import until
from server_run import Run
from streams import Kind, asked_all

_why = hosts.missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(_why), reason=_why)]

KEY, PORT = "a-key-of-a-cluster-of-hosts", 7300
NUM_RESTARTS = 50 if IS_LONG else 2
LIGHT = ("--kv-store-size", "256MiB", "--kv-cache-memory-bytes", str(256 << 20))
OPTIONS = (*LIGHT, "--dtype", "float32", "--max-model-len", "2048")
SCAN = """
import socket, sys
for port in range(1, 65536):
    with socket.socket() as sock:
        if sock.connect_ex((sys.argv[1], port)) == 0:
            sock.settimeout(10.0)
            sock.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n" + bytes(100))
            try:
                said = sock.recv(4096)
            except OSError:
                said = b""
            print(port, said.hex())
"""
_TLS_ALERT = "15"


class Cluster:
    """A server on the first host, and an agent on each of the others.

    Attributes:
        nodes: By host, in the hosts' order.
        server: Once it has been started.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self.network = network
        self.front, *self.others = network.hosts
        self.nodes: dict[str, NodeRun] = {}
        self._folder = folder
        for host in self.others:
            self.start_node(host)
        self.server: Run | None = None

    def start_node(self, host: Host) -> NodeRun:
        folder = self._folder / f"node-{host.address}-{random.randrange(10**6)}"
        node = NodeRun(folder, f"{host.address}:{PORT}", KEY, host.command)
        self.nodes[host.address] = node
        return node

    def serve(self, *options: str) -> Run:
        for node in self.nodes.values():
            node.wait_for("takes a server's engines")
        addresses = [word for node in self.nodes.values() for word in ("--node", node.address)]
        words = (*small_model.options(), *OPTIONS, *options, *addresses)
        environment = {KEY_VARIABLE: KEY}
        self.server = Run(
            self._folder / "serve", 8000, words, environment, None, self.front.command
        )
        self.server.wait_for("Ctrl-C ends it.")
        return self.server

    def asked(self, kinds: dict[str, Kind]) -> list[list[int]]:
        server = self.server
        assert server is not None
        answers = self.front.inside(lambda: asyncio.run(asked_all(server, kinds))).values()
        assert [answer.error for answer in answers] == [""] * len(answers)
        return [answer.tokens[0] for answer in answers]

    def metric(self, name: str, **labels: str) -> float:
        server = self.server
        assert server is not None
        return self.front.inside(lambda: server.metric(name, **labels))

    def is_ready(self, instance_id: str) -> bool:
        return self.metric("banaserve_instance_ready", instance_id=instance_id) == 1

    def close(self) -> None:
        if self.server is not None:
            self.server.close()
        for node in self.nodes.values():
            node.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network = Network(4)
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "serve").mkdir()
    stranger = network.hosts.pop()
    made = Cluster(network, folder)
    network.hosts.append(stranger)
    try:
        made.serve("--pd", "1:2")
        yield made
    finally:
        made.close()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


def streams(num: int, first: int, num_tokens: int = 48) -> dict[str, Kind]:
    body = {
        "model": "smollm2-135m",
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    prompts = [[100 + first + n, *range(200 + 7 * n, 500 + 7 * n)] for n in range(num)]
    return {
        str(n): Kind("/v1/completions", {**body, "prompt": prompt})
        for n, prompt in enumerate(prompts)
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One plain engine on this machine."""
    words = ("--colocated", "1", "--no-kv-store", "--migration", "off")
    folder = tmp_path_factory.mktemp("plain")
    run = Run(folder, 8123, (*small_model.options(), *OPTIONS, *words), {}, None)
    run.wait_for("Ctrl-C ends it.")
    yield run
    run.close()


@pytest.fixture(scope="module")
def expected(plain: Run) -> Callable[[dict[str, Kind]], list[list[int]]]:
    def ask(kinds: dict[str, Kind]) -> list[list[int]]:
        answers = asyncio.run(asked_all(plain, kinds)).values()
        return [answer.tokens[0] for answer in answers]

    return ask


def test_tokens_are_those_of_one_engine_and_a_prefix_is_read_on_the_other_host(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    kinds = streams(16, 0)
    assert cluster.asked(kinds) == expected(kinds)
    assert cluster.metric("vllm:external_prefix_cache_hits_total") > 0
    shm = [os.listdir(f"/proc/{n.process.pid}/root/dev/shm") for n in cluster.nodes.values()]
    assert shm == [[], []]


def test_layers_move_to_the_other_host_in_mid_stream_and_return(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    """``d1`` is alone on its host, ``p0`` on the other: by TCP, since memory is not shared."""
    kinds, server = streams(4, 40, 96), cluster.server
    assert server is not None
    wanted = expected(kinds)
    moved: list[object] = []

    def move() -> None:
        admin = AdminClient(*find_admin(server.run_dir))
        time.sleep(0.3)
        moved.append(cluster.front.inside(lambda: admin.run(MoveLayers("d1", "p0", (4, 12)))).state)
        moved.append(cluster.front.inside(lambda: admin.run(Return("d1"))).state)

    moving = threading.Thread(target=move)
    moving.start()
    found = cluster.asked(kinds)
    moving.join()
    assert moved == ["done", "done"]
    assert found == wanted
    assert cluster.asked(kinds) == wanted


@pytest.mark.parametrize("harm", ["cut", "stopped", "killed"])
def test_a_host_that_is_lost_is_routed_around_and_comes_back(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]], harm: str
) -> None:
    kinds = streams(8, 100 + 20 * len(harm), 96)
    wanted, host = expected(kinds), cluster.others[1]
    gone_s: list[float] = []

    def strike() -> None:
        time.sleep(0.3)
        node, began_s = cluster.nodes[host.address], time.monotonic()
        if harm == "cut":
            cluster.network.cut(host)
        elif harm == "stopped":
            node.signal_all(signal.SIGSTOP)
        else:
            cluster.network.cut(host)
            node.signal_all(signal.SIGKILL)
        until(lambda: not cluster.is_ready("d1"), "d1 is routed around")
        gone_s.append(time.monotonic() - began_s)
        time.sleep(max(0.0, 10.0 - gone_s[0]))  # the other side gives up too
        if harm == "stopped":
            node.signal_all(signal.SIGCONT)
        else:
            cluster.network.mend(host)
        if harm == "killed":
            node.close()
            cluster.start_node(host)

    striking = threading.Thread(target=strike)
    striking.start()
    try:
        found = cluster.asked(kinds)
    finally:
        striking.join()
    assert found == wanted
    print(f"{harm}: routed around after {gone_s[0]:.1f} s")
    until(lambda: cluster.is_ready("d1"), "d1 is back")
    again = streams(8, 100 + 20 * len(harm), 24)
    assert cluster.asked(again) == [tokens[:24] for tokens in wanted]


def test_restarts_on_one_address_are_never_taken_for_what_was_there(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    host = cluster.others[1]
    for number in range(NUM_RESTARTS):
        kinds = streams(4, 1000 + 10 * number, 24)
        node = cluster.nodes[host.address]
        node.signal_all(signal.SIGKILL)
        node.close()
        cluster.start_node(host)
        assert cluster.asked(kinds) == expected(kinds)
        until(lambda: cluster.is_ready("d1"), "d1 is back")
        assert cluster.asked(kinds) == expected(kinds)


def test_a_scan_of_all_ports_finds_nobody_who_talks(cluster: Cluster) -> None:
    stranger, host = cluster.network.hosts[-1], cluster.others[0]
    scanning = stranger.command([sys.executable, "-c", SCAN, host.address])
    said = subprocess.run(scanning, capture_output=True, text=True, check=True).stdout
    found = dict(line.split(" ") for line in said.splitlines())
    assert str(PORT) in found
    assert set(found) == {str(port) for where, port in host.listening() if where == host.address}
    assert all(answer == "" or answer.startswith(_TLS_ALERT) for answer in found.values())
    kinds = streams(2, 2000, 8)
    assert all(len(tokens) == 8 for tokens in cluster.asked(kinds))


def test_all_is_gone_when_the_server_ends(cluster: Cluster) -> None:
    assert cluster.server is not None
    assert cluster.server.end() == 0
    for node in cluster.nodes.values():
        until(lambda node=node: len(node.processes()) == 1, "only the agent is left")
        until(lambda node=node: not list(node.temp_dir.glob("banaserve-n*")), "folders are gone")
        node.end()
