"""``serve`` over three hosts: front door, prefill and decode each on one, and real engines."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from banaserve.contracts.migration_api import MoveLayers, Return
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from host_cluster import PORT, Cluster
from host_ports import listening, scanned
from observing import until
from streams import Kind, greedy

_why = hosts.missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(_why), reason=_why)]

NUM_RESTARTS = 50
_TLS_ALERT = b"\x15"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    network, folder = Network(4), tmp_path_factory.mktemp("hosts")
    made = Cluster(network, folder)
    try:
        made.start("--pd", "1:2")
        yield made
    finally:
        made.close()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_tokens_are_those_of_one_engine_and_a_prefix_is_read_on_the_other_host(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    kinds = greedy(16, 0)
    assert cluster.served.asked(kinds) == expected(kinds)
    assert cluster.served.metric("vllm:external_prefix_cache_hits_total") > 0
    # ``p0``'s engine has pushed to ``d1``'s store what it had of a block before it had the rest.
    near, away = map(cluster.store_of, cluster.others)
    assert near.pushed_blocks >= near.pushed_by_layer_blocks > 0
    assert away.received_blocks > 0 == away.pushed_blocks
    one, other = (node.address for node in cluster.nodes.values())
    for source, target in ((one, other), (other, one)):
        assert cluster.served.metric(
            "banaserve_node_bytes_per_second", source=source, target=target
        ) > cluster.served.metric("banaserve_node_round_trip_seconds", source=source, target=target)
    shm = [os.listdir(f"/proc/{n.process.pid}/root/dev/shm") for n in cluster.nodes.values()]
    assert shm == [[], []]


def test_layers_move_to_the_other_host_in_mid_stream_and_return(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    """``d1`` is alone on its host, ``p0`` on the other: by TCP, since memory is not shared."""
    kinds, served = greedy(4, 40, 96), cluster.served
    wanted = expected(kinds)
    moved: list[object] = []
    begun = threading.Event()

    def move() -> None:
        assert begun.wait(60.0)
        moved.append(served.migrated(MoveLayers("d1", "p0", (4, 12))).state)
        moved.append(served.migrated(Return("d1")).state)

    moving = threading.Thread(target=move)
    moving.start()
    found = cluster.served.asked(kinds, lambda _: begun.set())
    moving.join()
    assert moved == ["done", "done"]
    assert found == wanted
    assert cluster.served.asked(kinds) == wanted


@pytest.mark.long
def test_restarts_on_one_address_are_never_taken_for_what_was_there(
    cluster: Cluster, expected: Callable[[dict[str, Kind]], list[list[int]]]
) -> None:
    """Under eight streams, which are under way when it dies."""
    host = cluster.others[1]
    begun = threading.Event()

    def restart() -> None:
        assert begun.wait(60.0)
        node = cluster.nodes[host.address]
        node.signal_all(signal.SIGKILL)
        node.close()
        cluster.start_node(host)

    for number in range(NUM_RESTARTS):
        kinds = greedy(8, 1000 + 10 * number, 64)
        wanted, began_s = expected(kinds), time.monotonic()
        begun.clear()
        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            found = cluster.served.asked(kinds, lambda _: begun.set())
        finally:
            restarting.join()
        assert found == wanted
        until(lambda: cluster.served.is_ready("d1"), "d1 is back")
        print(f"restart {number + 1}: back after {time.monotonic() - began_s:.1f} s", flush=True)
        assert cluster.served.asked(kinds) == wanted


def test_a_scan_of_all_ports_finds_nobody_who_talks(cluster: Cluster) -> None:
    host = cluster.others[0]
    found = scanned(cluster.stranger, host.address)
    assert PORT in found
    assert set(found) == {port for where, port in listening(host) if where == host.address}
    assert all(answer == b"" or answer.startswith(_TLS_ALERT) for answer in found.values())
    kinds = greedy(2, 2000, 8)
    assert all(len(tokens) == 8 for tokens in cluster.served.asked(kinds))


def test_all_is_gone_when_the_server_ends(cluster: Cluster) -> None:
    assert cluster.served.run.end() == 0
    for node in cluster.nodes.values():
        until(lambda node=node: len(node.processes()) == 1, "only the agent is left")
        until(lambda node=node: not list(node.temp_dir.glob("banaserve-*/n*")), "folders are gone")
        node.end()
