"""Stores of two machines that share blocks, each a daemon of its own: bytes, faults, strangers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banaserve.base.access.key_files import PEER_KEY_VARIABLE
from banaserve.base.errors import UserError
from banaserve.kvstore.client.admin import fetch_stats, set_peers
from banaserve.kvstore.client.client import StoreClient
from banaserve.kvstore.daemon.connections.peer_server import PeerServer
from banaserve.kvstore.daemon.options import DaemonOptions, PeerOptions, StoreOptions
from banaserve.kvstore.daemon.server import StoreServer
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.peers.link import connect_to_peer
from banaserve.kvstore.peers.messages import VERSION, PeerHello, PeerWelcome, message_of, reply_in
from banaserve.transport.channels.connect import over_tcp
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.threaded_server import MAX_STRANGERS, ConnectionPlaces
from peer_store import DEADLINE_S, FINGERPRINT, KEY, NUM_SLOTS, SLOT_BYTES, PeerStore, chain
from ports import held_port
from store_process import be_patient, fork_store
from waiting import eventually

pytestmark = pytest.mark.deep


@pytest.fixture(autouse=True)
def _no_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch.setattr)


@pytest.fixture
def linked(two: tuple[PeerStore, PeerStore]) -> tuple[PeerStore, PeerStore]:
    there, here = two
    there.start()
    here.start(there)
    eventually(here.is_linked)
    return there, here


def test_what_one_has_computed_the_other_reads(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    keys = chain(0, 6)
    there.write(keys[:5])
    assert here.read(keys) == 5
    assert here.peers().promoted == 5
    assert (there.stats().lent_blocks, there.stats().lent_bytes) == (5, 5 * SLOT_BYTES)
    # Now they lie here, too, and go to nobody else.
    assert here.read(keys) == 5
    assert there.stats().lent_blocks == 5
    assert here.peers().stats.stores == here.peers().backlog_blocks == 0
    assert there.read(keys) == 5


def test_both_ways_and_over_several_peers(tmp_path: Path, stack: ExitStack) -> None:
    stores = [PeerStore(tmp_path, stack, name) for name in "abc"]
    for store in stores:
        store.start(*(other for other in stores if other is not store))
    for store in stores:
        eventually(lambda store=store: store.peers().stats.problem == "")
    for number, store in enumerate(stores):
        store.write(chain(100 * number, 3))
    for store in stores:
        for number in range(len(stores)):
            eventually(lambda s=store, n=number: s.read(chain(100 * n, 3)) == 3)
    assert sum(store.stats().lent_blocks for store in stores) >= 12


def test_peers_that_come_and_go_while_a_store_runs(tmp_path: Path, stack: ExitStack) -> None:
    here, one, other = (PeerStore(tmp_path, stack, name) for name in ("here", "one", "other"))
    for store in (here, one, other):
        store.start()
    one.write(chain(0, 4))
    other.write(chain(100, 4))
    assert here.read(chain(0, 2)) == here.read(chain(100, 2)) == 0
    set_peers(here.path, [one.address], DEADLINE_S)
    eventually(lambda: here.read(chain(0, 2)) == 2)
    set_peers(here.path, [one.address, other.address], DEADLINE_S)
    eventually(lambda: here.read(chain(100, 2)) == 2)
    set_peers(here.path, [other.address], DEADLINE_S)
    assert here.read(chain(0, 4)) == 2, "what came is here, and no more comes"
    assert here.read(chain(100, 4)) == 4
    one.kill()
    set_peers(here.path, [], DEADLINE_S)
    assert here.read(chain(100, 6)) == 4
    assert here.peers().stats.problem == ""
    set_peers(here.path, [other.address], DEADLINE_S)
    other.write(chain(200, 3))
    eventually(lambda: here.read(chain(200, 3)) == 3)


def test_a_peer_that_stands_still_is_left_without_waiting(
    linked: tuple[PeerStore, PeerStore],
) -> None:
    there, here = linked
    there.write(chain(0, 4))
    os.kill(there.process.pid, signal.SIGSTOP)
    # Asked, and not answered: nothing is said of these keys until it is known to be gone.
    here.client.lookup(chain(0, 4))
    set_peers(here.path, [], DEADLINE_S)
    assert here.read(chain(0, 4)) == 0
    os.kill(there.process.pid, signal.SIGCONT)
    set_peers(here.path, [there.address], DEADLINE_S)
    eventually(lambda: here.read(chain(0, 4)) == 4)


@pytest.mark.parametrize(
    ("refused", "nth"),
    [("peer-", 1), ("peer-", 4), ("push-", 1), ("close-127", 1), ("close-push-", 1)],
)
def test_a_store_that_gets_no_more_threads_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, nth: int
) -> None:
    path, start, num_asked = tmp_path / "here", threading.Thread.start, 0

    def refuse(thread: threading.Thread) -> None:
        nonlocal num_asked
        num_asked += thread.name.startswith(refused)
        if thread.name.startswith(refused) and num_asked == nth:
            raise RuntimeError("can't start new thread")
        start(thread)

    peers = PeerOptions(peers=("127.0.0.1:9",), key=KEY)
    server = StoreServer(DaemonOptions(size="64KiB", socket_path=path, peers=peers))
    running = threading.Thread(target=server.run)
    running.start()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(UserError, match="not all of its peers are set: can't start"):
                set_peers(path, ["127.0.0.1:10"], DEADLINE_S)
        set_peers(path, ["127.0.0.1:10"], DEADLINE_S)
        (tier,) = fetch_stats(path, DEADLINE_S).tiers
        assert tier.stats.problem.startswith("127.0.0.1:10: "), "the other one is left"
    finally:
        server.stop()
        running.join()
        server.close()
    assert not [thread for thread in threading.enumerate() if "127.0.0.1" in thread.name]


def test_peers_that_cannot_be_set(two: tuple[PeerStore, PeerStore], tmp_path: Path) -> None:
    there, here = two
    here.start()
    with pytest.raises(UserError, match="write HOST:PORT"):
        set_peers(here.path, [there.address, "nowhere"], DEADLINE_S)
    assert here.peers().stats.problem == ""
    alone = fork_store(tmp_path / "alone", NUM_SLOTS * SLOT_BYTES)
    try:
        with pytest.raises(UserError, match="started without a key of peers"):
            set_peers(tmp_path / "alone", [here.address], DEADLINE_S)
    finally:
        alone.kill()
        alone.wait()


def test_a_block_that_is_evicted_meanwhile_is_computed_again(
    linked: tuple[PeerStore, PeerStore],
) -> None:
    there, here = linked
    for round_ in range(8):
        keys = chain(100 * round_, NUM_SLOTS // 2)
        there.write(keys)
        here.client.lookup(keys)
        # What is known of them stays known for a while; the blocks do not.
        there.write(chain(100 * round_ + 50, NUM_SLOTS))
        assert here.read(keys) <= len(keys)
    assert here.is_linked()


def test_a_peer_with_another_key_gets_nothing(two: tuple[PeerStore, PeerStore]) -> None:
    there, here = two
    there.start()
    here.start(there, key="another key of that length")
    there.write(chain(0, 2))
    eventually(lambda: "turned away" in there.log.read_text())
    assert not here.is_linked()
    assert here.read(chain(0, 2)) == 0
    assert there.stats().lent_blocks == 0


def test_a_peer_that_does_not_answer_is_named_beside_one_that_does(
    two: tuple[PeerStore, PeerStore], stack: ExitStack
) -> None:
    there, here = two
    there.start()
    away = f"127.0.0.1:{held_port(stack)}"
    here.start(there)
    set_peers(here.path, [there.address, away], DEADLINE_S)
    eventually(lambda: away in here.peers().stats.problem)
    eventually(lambda: there.address not in here.peers().stats.problem)
    assert here.is_linked()


def test_blocks_of_another_layout_are_not_taken(two: tuple[PeerStore, PeerStore]) -> None:
    there, here = two
    there.start()
    here.start(there)
    eventually(here.is_linked)
    there.write(chain(0, 2))
    other = msgspec.structs.replace(FINGERPRINT, num_layers=4)
    here.client.close()
    client = StoreClient(here.path, other, client_name="other", timeout_s=DEADLINE_S)
    try:
        assert client.exchange(acquire=chain(0, 2)).lease is None
    finally:
        client.close()


@pytest.mark.parametrize("two", [fork_store], ids=[""], indirect=True)
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_is_lost_is_gone_without_and_comes_back(
    harm: signal.Signals, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    there.write(chain(0, 12))
    assert here.read(chain(0, 6)) == 6  # over each of the connections
    os.kill(there.process.pid, harm)
    eventually(lambda: not here.is_linked())
    # Nothing waits for it, and what came before is here.
    assert here.read(chain(0, 12)) == 6
    if harm is signal.SIGKILL:
        there.process.wait()
        there.start()
    else:
        os.kill(there.process.pid, signal.SIGCONT)
    eventually(here.is_linked)
    if harm is signal.SIGKILL:
        assert here.read(chain(0, 12)) == 6
        there.write(chain(6, 6))
    eventually(lambda: here.read(chain(6, 6)) == 6)
    assert here.peers().promotion_failures == 0


def test_strangers_keep_no_peer_out(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    there.write(chain(0, 6))
    strangers = [socket.create_connection(there.address.split(":")) for _ in range(20)]
    magic = b"banaserve-transport-1\n"
    for number, sock in enumerate(strangers):
        said = (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(500), magic + bytes(32))
        sock.sendall(said[number % len(said)])
    # One who has seen a handshake cannot repeat it: the answer is to a number of this connection.
    strangers[3].sendall(bytes(32))
    assert here.read(chain(0, 3)) == 3
    # Nor do they fill the log: one line a second.
    eventually(lambda: "turned away" in there.log.read_text())
    assert there.log.read_text().count("turned away") < 15
    for sock in strangers:
        sock.close()
    assert here.read(chain(0, 6)) == 6


class _NoBlocks:
    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        return [Lookup.MISS] * len(keys)

    def lent(self, key: bytes, num_bytes: int) -> Any:
        raise AssertionError("nothing is fetched")

    def close(self) -> None:
        pass


def test_silent_strangers_make_way_for_peers_and_peers_for_nobody() -> None:
    def peer() -> Any:
        sock = socket.create_connection(("127.0.0.1", server.port))
        return over_tcp(sock, KEY.encode(), time.monotonic() + DEADLINE_S, listening=False)

    def is_served(channel: Any) -> bool:
        reply = channel.call(message_of(PeerHello(VERSION)), DEADLINE_S)
        return reply_in(reply) == PeerWelcome(VERSION)

    server = PeerServer("127.0.0.1", 0, KEY.encode(), _NoBlocks())  # type: ignore[arg-type]
    with ExitStack() as stack:
        stack.callback(server.close)
        first = peer()
        stack.callback(first.close)
        assert is_served(first)
        for _ in range(3 * MAX_STRANGERS):
            stranger = socket.create_connection(("127.0.0.1", server.port))
            stack.callback(stranger.close)
        second = peer()
        stack.callback(second.close)
        assert is_served(second)
        assert is_served(first)


def test_peers_of_thirty_nodes_have_their_places_beside_strangers() -> None:
    """Five connections each, as a store opens them: more than strangers ever have."""
    with ExitStack() as stack:
        server = PeerServer("127.0.0.1", 0, KEY.encode(), _NoBlocks())  # type: ignore[arg-type]
        stack.callback(server.close)
        peers = []
        for number in range(5 * 30):
            if number % 5 == 0:
                stranger = socket.create_connection(("127.0.0.1", server.port))
                stack.callback(stranger.close)
            sock = socket.create_connection(("127.0.0.1", server.port))
            peers.append(
                over_tcp(sock, KEY.encode(), time.monotonic() + DEADLINE_S, listening=False)
            )
            stack.callback(peers[-1].close)
        for channel in peers:
            reply = channel.call(message_of(PeerHello(VERSION)), DEADLINE_S)
            assert reply_in(reply) == PeerWelcome(VERSION)


def test_strangers_are_bounded_however_many_places_there_are() -> None:
    places = ConnectionPlaces(100, num_strangers=2)
    socks = [socket.socket() for _ in range(5)]
    assert all(places.take(sock) for sock in socks[:2])
    assert places.proved(socks[0])
    assert places.take(socks[2])
    assert places.take(socks[3])  # in place of the second
    assert not places.proved(socks[1])
    assert places.proved(socks[2])
    assert places.take(socks[4])
    assert places.proved(socks[3])
    for sock in socks:
        sock.close()


@pytest.mark.parametrize("makes_way", [False, True])
def test_who_comes_last_is_turned_away_where_all_have_proved_themselves(makes_way: bool) -> None:
    places = ConnectionPlaces(2, 2 if makes_way else None)
    socks = [socket.socket() for _ in range(4)]
    assert places.take(socks[0])
    assert places.take(socks[1])
    assert places.take(socks[2]) is makes_way  # in place of the first
    assert places.proved(socks[1])
    assert places.proved(socks[0]) is not makes_way
    assert places.proved(socks[2]) is makes_way
    assert not places.take(socks[3])
    places.leave(socks[1])
    assert places.take(socks[3])
    for sock in socks:
        sock.close()


def test_strangers_of_one_address_make_way_for_those_of_others() -> None:
    places = ConnectionPlaces(4, num_strangers=4)
    socks = [socket.socket() for _ in range(30)]
    try:
        few = socks[:2]
        for number, sock in enumerate(few):
            assert places.take(sock, (f"10.0.0.{number}", 1))
        for number, sock in enumerate(socks[2:]):  # without pause, from one network
            assert places.take(sock, (f"2001:db8::{number}", 1, 0, 0))
        assert all(places.proved(sock) for sock in few)
        assert not places.proved(socks[2])
    finally:
        for sock in socks:
            sock.close()


def test_a_peer_of_another_address_is_served_while_strangers_connect_without_pause() -> None:
    server = PeerServer("127.0.0.1", 0, KEY.encode(), _NoBlocks())  # type: ignore[arg-type]
    at, deadline = ("127.0.0.1", server.port), time.monotonic() + DEADLINE_S
    with ExitStack() as stack:
        stack.callback(server.close)
        sock = socket.create_connection(at, source_address=("127.0.0.2", 0))
        for _ in range(3 * MAX_STRANGERS):  # between its connection and its proof
            stack.callback(socket.create_connection(at).close)
        channel = over_tcp(sock, KEY.encode(), deadline, listening=False)
        stack.callback(channel.close)
        reply = channel.call(message_of(PeerHello(VERSION)), DEADLINE_S)
        assert reply_in(reply) == PeerWelcome(VERSION)


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        (PeerOptions("here", (), KEY), "^address for peers 'here': write HOST:PORT"),
        (PeerOptions("", ("h:0",), KEY), "^peer 'h:0': write HOST:PORT"),
        (PeerOptions("", ("a..b:1",), KEY), "^peer 'a..b:1': write HOST:PORT"),
        (PeerOptions("", (f"h:{'1' * 5000}",), KEY), "write HOST:PORT"),
        (PeerOptions("", ("h:65536",), KEY), "write HOST:PORT"),
        (PeerOptions("127.0.0.1:1", (), ""), "need a key of 16 characters"),
        (PeerOptions("", ("h:1",), "short"), "need a key of 16 characters"),
    ],
)
def test_options_that_make_no_sense(peers: PeerOptions, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        StoreOptions(size="1MiB", peers=peers).check()
    assert KEY not in repr(peers)


def test_the_key_is_on_no_command_line() -> None:
    options = StoreOptions(size="1MiB", peers=PeerOptions("h:1", ("h:2", "h:3"), KEY))
    words = options.arguments()
    assert words[-3:] == ["--listen=h:1", "--peer=h:2", "--peer=h:3"]
    assert KEY not in " ".join(words)
    assert options.environment() == {PEER_KEY_VARIABLE: KEY}


def test_an_address_that_is_taken_is_one_line(tmp_path: Path, stack: ExitStack) -> None:
    first, second = PeerStore(tmp_path, stack, "first"), PeerStore(tmp_path, stack, "second")
    first.start()
    second.address = first.address
    with pytest.raises(AssertionError):
        second.start()
    assert "Address already in use" in second.log.read_text().splitlines()[-1]


def test_a_name_that_is_no_name_of_a_host_is_a_peer_that_is_away() -> None:
    with pytest.raises(PeerGoneError, match="label"):
        connect_to_peer(("store..example", 7000), KEY.encode())
