"""``serve --cluster`` with mock engines: Ray places the agents; what is lost, refused and left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("ray")

import small_model
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from fork_server import ForkServer
from mock_facts import MockOptions
from mock_hosts import MockHosts
from mock_run import started_elsewhere
from observing import DEADLINE_S, until
from ray_run import RayCluster
from served import Served
from streams import greedy

_why = hosts.missing()
# Ray takes as long to start as engines do.
pytestmark = [pytest.mark.room, pytest.mark.skipif(bool(_why), reason=_why)]

MOCKS = MockOptions(step_ms=4.0)
KINDS = greedy(4, 0, 48)


@dataclass
class World:
    """Ray on three hosts, and a server beside its head."""

    network: Network
    ray: RayCluster
    served: Served
    mocks: MockHosts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[World]:
    network, folder = Network(3), tmp_path_factory.mktemp("ray")
    mocks = MockHosts(fork_server, MOCKS)
    try:
        ray = RayCluster(network.hosts, folder, num_cpus=1, env=started_elsewhere(MOCKS))
        try:
            words = ("--pd", "1:1", "--cluster", ray.address)
            served = Served(network.hosts[0], folder / "serve", words, start=mocks.server)
            try:
                served.wait()
                yield World(network, ray, served, mocks)
            finally:
                served.run.close()
        finally:
            ray.close()
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wanted(world: World) -> list[list[int]]:
    """Answers while all is well."""
    return world.served.asked(KINDS)


def test_ray_brings_a_node_back_and_it_joins_empty(world: World, wanted: list[list[int]]) -> None:
    """All of a node's processes die: Ray's, the agent, its engine and store."""
    ray = world.ray
    lost = ray.nodes[0]
    lost.kill()
    names = ("p0", "d0")
    until(lambda: not all(world.served.is_ready(name) for name in names), "its instance is gone")
    gone = [name for name in names if not world.served.is_ready(name)]
    assert len(gone) == 1
    ray.nodes[0] = ray.start_node(0)
    until(lambda: world.served.is_ready(gone[0]), f"{gone[0]} is back")
    assert world.served.asked(KINDS) == wanted


def test_without_its_head_serving_ends_and_comes_back_with_it(
    world: World, wanted: list[list[int]]
) -> None:
    """What Ray was asked to run ends with the driver, and that with the Ray of its machine."""
    ray, served = world.ray, world.served
    ray.head.kill()
    until(lambda: not (served.is_ready("p0") or served.is_ready("d0")), "all nodes end")
    for node in ray.nodes:
        node.kill()
    ray.start()
    until(lambda: served.is_ready("p0") and served.is_ready("d0"), "all is back")
    assert served.asked(KINDS) == wanted


def test_all_is_gone_when_the_server_ends(world: World) -> None:
    trees = [node.tree for node in world.ray.nodes]

    def ours() -> list[str]:
        lines = [" ".join(one.cmdline()) for tree in trees for one in tree.alive()]
        # Ray's own processes may run from a folder of that name.
        return [line for line in lines if "-m banaserve" in line or "mock_parent" in line]

    assert ours()
    assert world.served.run.end() == 0
    until(lambda: not ours(), "agents, engines and stores end")
    assert all(node.process.poll() is None for node in world.ray.nodes)


@pytest.mark.parametrize(
    ("address", "num_instances", "words"),
    [
        ("10.77.0.1:1", "1:1", "--cluster 10.77.0.1:1: "),
        ("RAY", "2:2", "CPUs, one for each, (room for 0)"),
    ],
)
def test_what_ray_cannot_do_is_one_line(
    world: World, tmp_path: Path, address: str, num_instances: str, words: str
) -> None:
    where = world.ray.address if address == "RAY" else address
    options = ("--pd", num_instances, "--cluster", where)
    refused = Served(
        world.network.hosts[0], tmp_path / "refused", options, start=world.mocks.server
    )
    try:
        until(lambda: refused.run.process.poll() is not None, "serve ends")
        assert refused.run.process.returncode == 2
        line = refused.run.errors.read_text().strip().splitlines()[-1]
        assert line.startswith("banaserve: ")
        assert words in line
    finally:
        refused.run.close()


def test_doctor_compares_the_nodes_of_the_cluster(world: World) -> None:
    """Agents that Ray starts for as long as this takes; the server has left."""
    words = ["doctor", "--json", "--model", small_model.options()[1]]
    command = [sys.executable, "-P", "-m", "banaserve", *words, "--cluster", world.ray.address]
    host = world.network.hosts[0]
    done = subprocess.run(host.command(command), capture_output=True, text=True, timeout=DEADLINE_S)
    found = json.loads(done.stdout)["findings"]
    nodes = [one for one in found if one["name"].startswith("node ")]
    assert [one["status"] for one in nodes] == ["OK", "OK"], done.stdout
    ways = [one["detail"] for one in found if " to " in one["name"]]
    assert len(ways) == 4
    assert all("ms there and back" in detail for detail in ways)
    assert done.returncode == 0, done.stdout
