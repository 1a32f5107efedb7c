"""A connection to a server breaks if the server's host is gone, and only then."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from banaserve.base.net import sockets as keep_alive
from benchmarks.network import hosts
from benchmarks.network.hosts import Network

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := hosts.missing():
        pytest.skip(reason)
    made = Network(2)
    yield made
    made.close()


@pytest.mark.deep
@pytest.mark.parametrize("has_sent", [False, True], ids=["idle", "unacknowledged"])
def test_a_server_that_is_cut_off_breaks_the_connection(
    network: Network, has_sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SERVER_IDLE_S", "SERVER_INTERVAL_S", "SERVER_PROBES"):
        monkeypatch.setattr(keep_alive, name, 1)
    there, here = network.hosts
    with (
        there.inside(lambda: socket.create_server((there.address, 0))) as listening,
        here.inside(lambda: socket.create_connection(listening.getsockname()[:2])) as client,
        listening.accept()[0] as accepted,
    ):
        keep_alive.watch_server(client)
        client.settimeout(DEADLINE_S)
        accepted.sendall(b"an answer begins")
        assert client.recv(100) == b"an answer begins"
        network.cut(there)
        if has_sent:
            client.sendall(b"another request")
        with pytest.raises(OSError, match=r"timed out|No route") as broken:
            client.recv(100)
        assert broken.value.errno is not None, "the kernel has found out, and no timeout of ours"
    network.mend(there)


def test_sockets_of_this_machine_alone_are_left_as_they_are() -> None:
    one, other = socket.socketpair()
    with one, other:
        keep_alive.watch_server(one)
        assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
