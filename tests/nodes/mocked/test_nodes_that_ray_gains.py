"""``serve --cluster`` with mock engines: a node that Ray gains joins; one of the start leaves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("ray")

from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.control_api import NodeRequest, ScaleRequest
from banaserve.contracts.instances import NodeChange, NodeStatus
from banaserve.frontdoor.admin_client import AdminClient
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from fork_server import ForkServer
from mock_facts import MockOptions
from mock_hosts import MockHosts
from mock_run import started_elsewhere
from observing import until
from ray_run import RayCluster
from served import Served
from streams import greedy

_why = hosts.missing()
# Ray takes as long to start as engines do.
pytestmark = [pytest.mark.room, pytest.mark.skipif(bool(_why), reason=_why)]

_JOINED_S = 120.0
MOCKS = MockOptions(step_ms=4.0)
KINDS = greedy(8, 0, 48)


class World:
    """Ray on a head and one host at first, and a server beside the head."""

    def __init__(self, folder: Path, forks: ForkServer) -> None:
        env, start = started_elsewhere(MOCKS), MockHosts(forks, MOCKS).server
        with ExitStack() as closing:
            self.network = Network(3)
            closing.callback(self.network.close)
            self.ray = RayCluster(self.network.hosts, folder, num_cpus=2, num_nodes=1, env=env)
            closing.callback(self.ray.close)
            words = ("--pd", "1:1", "--cluster", self.ray.address)
            self.served = Served(self.network.hosts[0], folder / "serve", words, start=start)
            closing.callback(self.served.run.close)
            self.served.wait()
            self.admin = AdminClient(*find_admin(self.served.run.run_dir))
            self._closing = closing.pop_all()

    def nodes(self) -> list[NodeStatus]:
        return self.network.hosts[0].inside(self.admin.nodes)

    def changed(self, ask: NodeRequest) -> NodeChange:
        """A change of nodes that has ended."""
        front, found = self.network.hosts[0], None

        def has_ended() -> bool:
            nonlocal found
            found = front.inside(lambda: self.admin.node_changes.show(begun.id, wait_s=5.0))
            return not found.is_open

        begun = front.inside(lambda: self.admin.node_changes.begin(ask))
        until(has_ended, f"{ask.action} {ask.node}", _JOINED_S)
        assert found is not None
        return found

    def close(self) -> None:
        self._closing.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("gained")
    made = World(folder, fork_server)
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wanted(world: World) -> list[list[int]]:
    """Answers of the first node."""
    return world.served.asked(KINDS)


def test_what_ray_gains_joins_and_gets_the_next_instance(
    world: World, wanted: list[list[int]]
) -> None:
    first, gained = world.network.hosts[1].address, world.network.hosts[2].address
    assert [node.name.partition(":")[0] for node in world.nodes()] == [first]
    world.ray.nodes.append(world.ray.start_node(1))
    until(lambda: len(world.nodes()) == 2, "the node has joined", _JOINED_S)
    assert world.nodes()[1].name.startswith(gained)
    front = world.network.hosts[0]
    scaling = front.inside(lambda: world.admin.scalings.begin(ScaleRequest(1, 2)))
    until(
        lambda: front.inside(lambda: not world.admin.scalings.show(scaling.id, wait_s=5.0).is_open),
        "d1 serves",
        _JOINED_S,
    )
    shown = {one.id: one.node.partition(":")[0] for one in world.served.status().instances}
    assert shown == {"p0": first, "d0": first, "d1": gained}
    assert world.served.asked(KINDS) == wanted


def test_a_node_of_the_start_is_given_back(world: World, wanted: list[list[int]]) -> None:
    first, gained = world.nodes()
    done = world.changed(NodeRequest("remove", first.name, 60.0))
    assert (done.state, done.reason) == ("done", "")
    assert [node.name for node in world.nodes()] == [gained.name]
    assert world.served.asked(KINDS) == wanted
    again = world.changed(NodeRequest("add", world.network.hosts[1].address))
    assert again.state == "done", again
    assert [node.name.partition(":")[0] for node in world.nodes()] == [
        gained.name.partition(":")[0],
        world.network.hosts[1].address,
    ]
