"""``serve --cluster``: Ray places the agents on two hosts; real engines."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

pytest.importorskip("ray")

from banaserve.contracts.migration_api import MoveLayers, Return
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from ray_run import RayCluster
from served import Served
from streams import Kind, greedy

_why = hosts.missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(_why), reason=_why)]

Expected = Callable[[dict[str, Kind]], list[list[int]]]


@dataclass
class World:
    """Ray on three hosts, and a server beside its head."""

    network: Network
    ray: RayCluster
    served: Served


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    network, folder = Network(3), tmp_path_factory.mktemp("ray")
    try:
        ray = RayCluster(network.hosts, folder, num_cpus=1)
        try:
            words = ("--pd", "1:1", "--cluster", ray.address)
            served = Served(network.hosts[0], folder / "serve", words)
            try:
                served.wait()
                yield World(network, ray, served)
            finally:
                served.run.close()
        finally:
            ray.close()
    finally:
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_tokens_are_those_of_one_engine_and_a_prefix_is_read_on_the_other_host(
    world: World, expected: Expected
) -> None:
    kinds = greedy(16, 0)
    assert world.served.asked(kinds) == expected(kinds)
    assert world.served.metric("vllm:external_prefix_cache_hits_total") > 0


def test_layers_move_to_the_other_host_in_mid_stream_and_return(
    world: World, expected: Expected
) -> None:
    kinds = greedy(4, 40, 96)
    wanted = expected(kinds)
    moved: list[str] = []
    begun = threading.Event()

    def move() -> None:
        assert begun.wait(60.0)
        moved.append(world.served.migrated(MoveLayers("d0", "p0", (4, 12))).state)
        moved.append(world.served.migrated(Return("d0")).state)

    moving = threading.Thread(target=move)
    moving.start()
    found = world.served.asked(kinds, lambda _: begun.set())
    moving.join()
    assert (moved, found) == (["done", "done"], wanted)
