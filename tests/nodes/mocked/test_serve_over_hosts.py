"""``serve`` over three hosts with mock engines: hosts that are cut, stopped or die; strangers."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.network import hosts
from benchmarks.network.hosts import Host, Network
from depth import IS_LONG
from fork_server import ForkServer
from host_cluster import PORT, Cluster
from host_ports import listening, scanned
from mock_facts import MockOptions
from mock_hosts import MockHosts
from observing import until
from streams import greedy

_why = hosts.missing()
pytestmark = [pytest.mark.room, pytest.mark.skipif(bool(_why), reason=_why)]

NUM_RESTARTS = 50 if IS_LONG else 1
KINDS = greedy(8, 0, 150)
_TLS_ALERT = b"\x15"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Iterator[Cluster]:
    network, folder = Network(4), tmp_path_factory.mktemp("hosts")
    mocks = MockHosts(fork_server, MockOptions(step_ms=8.0))
    made = Cluster(network, folder, mocks.node, mocks.server)
    try:
        made.start("--pd", "1:2")
        yield made
    finally:
        made.close()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def wanted(cluster: Cluster) -> list[list[int]]:
    """Answers while all is well."""
    return cluster.served.asked(KINDS)


def shown_as_away(cluster: Cluster, host: Host) -> bool:
    """Whether ``status`` says of ``d1``, and of no other, that its node is away."""
    near = next(other for other in cluster.others if other is not host)
    shown = {one.id: (one.state, one.node) for one in cluster.served.status().instances}
    there, gone = f"{near.address}:{PORT}", f"{host.address}:{PORT}"
    return shown == {"p0": ("ready", there), "d0": ("ready", there), "d1": ("away", gone)}


@pytest.mark.parametrize("harm", ["cut", "stopped", "killed"])
def test_a_host_that_is_lost_is_routed_around_and_comes_back(
    cluster: Cluster, wanted: list[list[int]], harm: str
) -> None:
    host = cluster.others[1]
    gone_s: list[float] = []
    begun = threading.Event()

    def strike() -> None:
        assert begun.wait(60.0)
        node, began_s = cluster.nodes[host.address], time.monotonic()
        if harm == "cut":
            cluster.network.cut(host)
        elif harm == "stopped":
            node.signal_all(signal.SIGSTOP)
        else:
            cluster.network.cut(host)
            node.signal_all(signal.SIGKILL)
        until(lambda: not cluster.served.is_ready("d1"), "d1 is routed around")
        gone_s.append(time.monotonic() - began_s)
        until(lambda: shown_as_away(cluster, host), "status says that d1 is away")
        if harm == "cut":
            until(lambda: len(node.processes()) == 1, "the agent gives up too: it alone is left")
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
        found = cluster.served.asked(KINDS, lambda _: begun.set())
    finally:
        striking.join()
    assert found == wanted
    print(f"{harm}: routed around after {gone_s[0]:.1f} s")
    until(lambda: cluster.served.is_ready("d1"), "d1 is back")
    again = greedy(8, 0, 24)
    assert cluster.served.asked(again) == [tokens[:24] for tokens in wanted]


def test_restarts_on_one_address_are_never_taken_for_what_was_there(
    cluster: Cluster, wanted: list[list[int]]
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
        began_s = time.monotonic()
        begun.clear()
        restarting = threading.Thread(target=restart)
        restarting.start()
        try:
            found = cluster.served.asked(KINDS, lambda _: begun.set())
        finally:
            restarting.join()
        assert found == wanted
        until(lambda: cluster.served.is_ready("d1"), "d1 is back")
        print(f"restart {number + 1}: back after {time.monotonic() - began_s:.1f} s", flush=True)
        assert cluster.served.asked(KINDS) == wanted


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
