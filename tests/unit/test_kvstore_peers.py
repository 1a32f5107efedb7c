"""Stores of two machines that share blocks, each a daemon of its own: bytes, faults, strangers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from banaserve.errors import UserError
from banaserve.kvstore.client import StoreClient
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.peers.options import KEY_VARIABLE, PeerOptions
from peer_store import FINGERPRINT, KEY, NUM_SLOTS, SLOT_BYTES, PeerStore, chain
from waiting import eventually


@pytest.fixture
def two(tmp_path: Path, stack: ExitStack) -> tuple[PeerStore, PeerStore]:
    """A store that has blocks, and one that fetches them; neither is started."""
    return PeerStore(tmp_path, stack, "there"), PeerStore(tmp_path, stack, "here")


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


def test_blocks_of_another_layout_are_not_taken(two: tuple[PeerStore, PeerStore]) -> None:
    there, here = two
    there.start()
    here.start(there)
    eventually(here.is_linked)
    there.write(chain(0, 2))
    other = msgspec.structs.replace(FINGERPRINT, num_layers=4)
    here.client.close()
    client = StoreClient(here.path, other, client_name="other", timeout_s=10.0)
    try:
        assert client.exchange(acquire=chain(0, 2)).lease is None
    finally:
        client.close()


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_peer_that_is_lost_is_gone_without_and_comes_back(
    harm: signal.Signals, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    there.write(chain(0, 4))
    assert here.read(chain(0, 2)) == 2
    os.kill(there.process.pid, harm)
    eventually(lambda: not here.is_linked())
    # Nothing waits for it, and what came before is here.
    assert here.read(chain(0, 4)) == 2
    if harm is signal.SIGKILL:
        there.process.wait()
        there.start()
    else:
        os.kill(there.process.pid, signal.SIGCONT)
    eventually(here.is_linked)
    if harm is signal.SIGKILL:
        assert here.read(chain(0, 4)) == 2
        there.write(chain(2, 2))
    eventually(lambda: here.read(chain(2, 2)) == 2)


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
    eventually(lambda: there.log.read_text().count("turned away") >= 15)
    for sock in strangers:
        sock.close()
    assert here.read(chain(0, 6)) == 6


@pytest.mark.parametrize(
    ("peers", "why"),
    [
        (PeerOptions("here", (), KEY), "--kv-store-listen 'here': write HOST:PORT"),
        (PeerOptions("", ("h:0",), KEY), "--kv-store-peer 'h:0': write HOST:PORT"),
        (PeerOptions("", ("h:65536",), KEY), "write HOST:PORT"),
        (PeerOptions("127.0.0.1:1", (), ""), "need a key of 16 characters"),
        (PeerOptions("", ("h:1",), "short"), "need a key of 16 characters"),
    ],
)
def test_options_that_make_no_sense(peers: PeerOptions, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why):
        StoreOptions(size="1MiB", peers=peers).config(tmp_path / "s")
    assert KEY not in repr(peers)


def test_the_key_is_on_no_command_line() -> None:
    options = StoreOptions(size="1MiB", peers=PeerOptions("h:1", ("h:2", "h:3"), KEY))
    words = options.arguments()
    assert words[-3:] == ["--listen=h:1", "--peer=h:2", "--peer=h:3"]
    assert KEY not in " ".join(words)
    assert options.environment() == {KEY_VARIABLE: KEY}


def test_an_address_that_is_taken_is_one_line(tmp_path: Path, stack: ExitStack) -> None:
    first, second = PeerStore(tmp_path, stack, "first"), PeerStore(tmp_path, stack, "second")
    first.start()
    second.address = first.address
    with pytest.raises(AssertionError):
        second.start()
    assert "Address already in use" in second.log.read_text().splitlines()[-1]
