"""Stores on hosts of their own that share blocks over a network: cuts, restarts, strangers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from benchmarks.network import hosts
from benchmarks.network.hosts import Host, Network
from depth import IS_LONG
from host_ports import listening, scanned
from peer_store import SLOT_BYTES, PeerStore, chain
from store_process import start_store
from waiting import eventually

_why = hosts.missing()
pytestmark = [pytest.mark.deep, pytest.mark.skipif(bool(_why), reason=_why)]

PORT = 7100
NUM_RESTARTS = 50 if IS_LONG else 4


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(3)
    yield made
    made.close()


def store_on(host: Host, folder: Path, stack: ExitStack, name: str) -> PeerStore:
    address = f"{host.address}:{PORT}"
    return PeerStore(folder, stack, name, address, partial(start_store, within=host.command))


@pytest.fixture
def linked(network: Network, tmp_path: Path, stack: ExitStack) -> tuple[PeerStore, PeerStore]:
    """A store on each of two hosts; the second fetches from the first."""
    there, here = (
        store_on(host, tmp_path, stack, name)
        for host, name in zip(network.hosts, ("there", "here"), strict=False)
    )
    there.start()
    here.start(there)
    eventually(here.is_linked)
    return there, here


def test_a_prefix_is_read_on_another_host(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    there.write(chain(0, 6))
    assert here.read(chain(0, 6)) == 6
    shm = [os.listdir(f"/proc/{one.process.pid}/root/dev/shm") for one in linked]
    assert shm == [[], []]


def test_a_cut_link_costs_its_blocks_alone(
    network: Network, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    there.write(chain(0, 6))
    assert here.read(chain(0, 2)) == 2
    network.cut(network.hosts[0])
    eventually(lambda: not here.is_linked())
    assert here.read(chain(0, 6)) == 2
    network.mend(network.hosts[0])
    eventually(here.is_linked)
    eventually(lambda: here.read(chain(0, 6)) == 6)


def test_one_that_comes_back_at_the_same_address_is_another(
    linked: tuple[PeerStore, PeerStore],
) -> None:
    """Its blocks are new ones; none of the old is expected of it, and nothing is taken for them."""
    there, here = linked
    for number in range(NUM_RESTARTS):
        there.write(chain(100 * number, 3))
        eventually(lambda first=100 * number: here.read(chain(first, 3)) == 3)
        there.write(chain(100 * number + 50, 3))
        there.kill()
        there.start()
        eventually(here.is_linked)
        assert here.read(chain(100 * number + 50, 3)) == 0
    stats = here.stats()
    assert (stats.leased_slots, stats.promoting_slots, stats.protocol_errors) == (0, 0, 0)


def test_a_stopped_host_is_gone_without(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    there.write(chain(0, 6))
    os.kill(there.process.pid, signal.SIGSTOP)
    eventually(lambda: not here.is_linked())
    assert here.read(chain(0, 6)) == 0
    os.kill(there.process.pid, signal.SIGCONT)
    eventually(here.is_linked)
    eventually(lambda: here.read(chain(0, 6)) == 6)


def test_a_slow_link_is_no_dead_peer(network: Network, linked: tuple[PeerStore, PeerStore]) -> None:
    """Blocks keep it busy for seconds, and the answer to a heartbeat is behind them."""
    there, here = linked
    num_blocks = 8
    there.write(chain(0, num_blocks))
    network.slow_down(network.hosts[0], f"{8 * num_blocks * SLOT_BYTES // 6}bit")
    try:
        assert here.read(chain(0, num_blocks)) == num_blocks
    finally:
        network.slow_down(network.hosts[0], "10gbit")
    assert here.peers().stats.failures == here.peers().promotion_failures == 0


def test_a_scan_of_all_ports_finds_one_that_says_nothing(
    network: Network, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    there_host, _, stranger = network.hosts
    assert listening(there_host) == {(there_host.address, PORT)}
    assert scanned(stranger, there_host.address) == {PORT: b""}
    there.write(chain(0, 3))
    assert here.read(chain(0, 3)) == 3
