"""Blocks that one store pushes to another while they are written: order, failures, lost peers."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from banaserve.base.errors import ProtocolError
from banaserve.base.platform.fail_points import VARIABLE, FailPoint
from banaserve.kvstore.client.admin import set_peers
from banaserve.kvstore.daemon.connections.peer_server import PeerServer
from banaserve.kvstore.daemon.pushes.receiving import Reception
from banaserve.kvstore.leases import Exchanged, Lookup, Slot
from banaserve.kvstore.peers.link import connect_to_peer, exchange
from banaserve.kvstore.peers.messages import (
    AskBlocks,
    BlockStates,
    EndPush,
    OfferPush,
    PeerRequest,
    PushRange,
    PushWanted,
    message_of,
)
from banaserve.kvstore.peers.push import Push, PushLink
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import PeerGoneError, TransportError
from banaserve.transport.interface import Tensor
from peer_store import DEADLINE_S, FINGERPRINT, KEY, NUM_SLOTS, SLOT_BYTES, PeerStore, block, chain
from store_process import be_patient, fork_store, start_store
from waiting import eventually

pytestmark = pytest.mark.deep

NUM_LAYERS, PARTS = FINGERPRINT.num_layers, FINGERPRINT.num_parts
NAMESPACE = FINGERPRINT.namespace()


@pytest.fixture(autouse=True)
def _no_peer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch.setattr)


@pytest.fixture
def linked(two: tuple[PeerStore, PeerStore]) -> tuple[PeerStore, PeerStore]:
    there, here = two
    start(there, here)
    return there, here


def start(there: PeerStore, here: PeerStore) -> None:
    """Both know each other, and what their clients' blocks are."""
    # A peer that does not listen yet is asked again a second later: each is told once both do.
    there.start()
    here.start(there)
    set_peers(there.path, [here.address], DEADLINE_S)
    for one in (there, here):
        eventually(one.is_linked)
        one.client.connect()


def reserve(store: PeerStore, keys: Sequence[bytes]) -> list[Slot]:
    pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
    return [slot for slot in store.client.exchange(reserve=pairs).reserved if slot is not None]


def fill(
    store: PeerStore, keys: Sequence[bytes], slots: Sequence[Slot], layers: range, part: int = 0
) -> None:
    """Write some layers of one part of each block, and say so."""
    view = store.client.view()
    for key, slot in zip(keys, slots, strict=True):
        for layer in layers:
            first = FINGERPRINT.offset_bytes(layer, part)
            at = view.offset_bytes(slot, layer, part)
            run = block(key)[first : first + FINGERPRINT.page_bytes]
            view.memory[at : at + FINGERPRINT.page_bytes] = run
    store.client.note_written(slots, layers.stop, part)


def holds_first_layer(store: PeerStore, keys: Sequence[bytes], slots: Sequence[Slot]) -> bool:
    """Whether its bytes, of every part of each block, are those of the keys."""
    view, size = store.client.view(), FINGERPRINT.page_bytes
    places = [
        (key, FINGERPRINT.offset_bytes(0, part), view.offset_bytes(slot, 0, part))
        for key, slot in zip(keys, slots, strict=True)
        for part in range(PARTS)
    ]
    return all(
        np.array_equal(view.memory[at : at + size], block(key)[first : first + size])
        for key, first, at in places
    )


def finish(store: PeerStore, keys: Sequence[bytes], slots: Sequence[Slot], first: int = 0) -> None:
    for part in range(PARTS):
        fill(store, keys, slots, range(first, NUM_LAYERS), part)
        assert store.client.commit(slots, part)


def states(store: PeerStore, keys: Sequence[bytes]) -> list[Lookup]:
    return store.client.lookup(keys)


def is_empty(*stores: PeerStore) -> bool:
    """Nothing is reserved, on its way, leased or pinned."""
    found = [store.stats() for store in stores]
    return all((s.writing_slots, s.promoting_slots, s.leased_slots) == (0, 0, 0) for s in found)


def can_be_emptied(*stores: PeerStore) -> bool:
    """No block is pinned: every slot can be had again."""
    for store in stores:
        store.client.clear()
    return is_empty(*stores) and all(store.stats().used_slots == 0 for store in stores)


def test_layers_go_over_while_others_are_written(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    keys = chain(0, 6)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == 6)
    for part in range(PARTS):
        fill(there, keys, slots, range(1), part)
    # On its way is not there, for readers here and for peers.
    assert states(here, keys) == [Lookup.PENDING] * 6
    granted = here.client.exchange(acquire=keys)
    assert (len(granted.slots), granted.num_ready) == (6, 0)
    assert granted.wait_s > 0
    assert here.client.arrivals(granted.slots) == [Lookup.PENDING] * 6
    finish(there, keys, slots, 1)
    eventually(lambda: here.client.arrivals(granted.slots) == [Lookup.HIT] * 6)
    assert granted.lease is not None
    here.client.release(granted.lease)
    assert here.read(keys) == 6
    # Nothing was fetched: it had come before it was asked for.
    assert here.peers().stats.loads == there.stats().lent_blocks == 0
    assert (there.stats().pushed_blocks, here.stats().received_blocks) == (6, 6)
    assert there.stats().pushed_by_layer_blocks == 6
    eventually(lambda: can_be_emptied(there, here))


def test_blocks_are_pushed_to_a_store_that_joins_and_no_more_to_one_that_leaves(
    two: tuple[PeerStore, PeerStore],
) -> None:
    there, here = two
    for one in two:
        one.start()
        one.client.connect()
    set_peers(there.path, [here.address], DEADLINE_S)
    keys = chain(0, 6)
    slots = reserve(there, keys[:4])
    there.client.push(here.address, keys[:4])
    eventually(lambda: here.stats().promoting_slots == 4)
    finish(there, keys[:4], slots)
    eventually(lambda: states(here, keys[:4]) == [Lookup.HIT] * 4)
    rest = reserve(there, keys[4:])
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == 2)
    set_peers(there.path, [], DEADLINE_S)
    # What was on its way comes to nothing there, and is whole here.
    eventually(lambda: here.stats().promoting_slots == 0)
    finish(there, keys[4:], rest)
    assert there.read(keys) == 6
    assert states(here, keys) == [Lookup.HIT] * 4 + [Lookup.MISS] * 2
    assert here.stats().received_blocks == 4
    eventually(lambda: can_be_emptied(there, here))


def test_nothing_but_what_lacks_is_sent(linked: tuple[PeerStore, PeerStore]) -> None:
    """Blocks that the peer has, that are here already, and that are still being written."""
    there, here = linked
    keys = chain(0, 6)
    here.write(keys[:2])
    there.write(keys[:4])
    slots = reserve(there, keys[4:])
    there.client.push(here.address, keys)
    eventually(lambda: states(here, keys) == [Lookup.HIT] * 4 + [Lookup.PENDING] * 2)
    finish(there, keys[4:], slots)
    eventually(lambda: here.read(keys) == 6)
    assert here.stats().received_blocks == 4
    eventually(lambda: can_be_emptied(there, here))


def test_parts_of_a_prompt_and_its_last_block(linked: tuple[PeerStore, PeerStore]) -> None:
    """Steps of a prompt commit some blocks while others have not begun."""
    there, here = linked
    keys = chain(0, 6)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    for first in (0, 2, 4):
        finish(there, keys[first : first + 2], slots[first : first + 2])
        wanted = [Lookup.HIT] * (first + 2) + [Lookup.PENDING] * (4 - first)
        eventually(lambda w=wanted: states(here, keys) == w)
    assert here.read(keys) == 6


@pytest.mark.parametrize("how", ["abandoned", "client lost"])
def test_what_is_given_up_is_never_read_anywhere(
    how: str, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    keys = chain(0, 4)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    for part in range(PARTS):
        fill(there, keys, slots, range(NUM_LAYERS), part)
    for part in range(PARTS):
        assert there.client.commit(slots[:2], part)
    eventually(lambda: states(here, keys) == [Lookup.HIT] * 2 + [Lookup.PENDING] * 2)
    granted = here.client.exchange(acquire=keys)
    if how == "abandoned":
        there.client.abandon(slots[2:])
    else:
        there.client.close()
    eventually(lambda: Lookup.PENDING not in here.client.arrivals(granted.slots))
    arrived = here.client.arrivals(granted.slots)
    assert arrived == [Lookup.HIT] * 2 + [Lookup.MISS] * 2

    def is_missing_for_good() -> bool:
        found = states(here, keys)
        assert found[:2] == [Lookup.HIT] * 2
        # What the peer has said is believed for a moment; then it is asked again.
        assert set(found[2:]) <= {Lookup.MISS, Lookup.ASKED}
        return found[2:] == [Lookup.MISS] * 2

    eventually(is_missing_for_good)
    assert granted.lease is not None
    here.client.release(granted.lease)
    eventually(lambda: is_empty(there, here))


@pytest.mark.parametrize("two", [fork_store], ids=[""], indirect=True)
@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("loses", ["sender", "receiver"])
def test_a_side_that_is_lost_in_the_middle_leaves_nothing_at_the_other(
    harm: signal.Signals, loses: str, linked: tuple[PeerStore, PeerStore]
) -> None:
    there, here = linked
    keys = chain(0, 4)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == 4)
    for part in range(PARTS):
        fill(there, keys, slots, range(1), part)
    granted = here.client.exchange(acquire=keys) if loses == "sender" else None
    lost, left = (there, here) if loses == "sender" else (here, there)
    os.kill(lost.process.pid, harm)
    if granted is not None:
        eventually(lambda: here.client.arrivals(granted.slots) == [Lookup.MISS] * 4)
        assert granted.lease is not None
        here.client.release(granted.lease)
        assert not {Lookup.HIT, Lookup.PENDING} & {*states(here, keys)}
    else:
        finish(there, keys, slots, 1)
        assert states(there, keys) == [Lookup.HIT] * 4
    eventually(lambda: can_be_emptied(left))
    if harm is signal.SIGSTOP:
        os.kill(lost.process.pid, signal.SIGCONT)
        if loses == "sender":
            finish(there, keys, slots, 1)
        # What was under way is over; what is pushed next goes over.
        eventually(lambda: can_be_emptied(there, here))
        again = chain(100, 3)
        slots = reserve(there, again)

        def comes() -> bool:
            there.client.push(here.address, again)
            return states(here, again) == [Lookup.PENDING] * 3

        eventually(comes)
        finish(there, again, slots)
        eventually(lambda: here.read(again) == 3)


def test_a_peer_that_comes_back_is_another(linked: tuple[PeerStore, PeerStore]) -> None:
    """What the old one was being sent is no part of what the new one is."""
    there, here = linked
    keys = chain(0, 4)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == 4)
    here.kill()
    here.client.close()
    here.start(there)
    here.client.connect()
    finish(there, keys, slots)
    assert states(here, keys) in ([Lookup.MISS] * 4, [Lookup.ASKED] * 4, [Lookup.HIT] * 4)
    assert here.stats().received_blocks == 0
    eventually(here.is_linked)
    eventually(lambda: here.read(keys) == 4)
    eventually(lambda: can_be_emptied(there))


def test_a_peer_without_room_takes_what_it_can(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    keys = chain(0, NUM_SLOTS)
    slots = reserve(there, keys)
    assert len(slots) == NUM_SLOTS
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == NUM_SLOTS // 2)
    finish(there, keys, slots)
    eventually(lambda: here.stats().received_blocks == NUM_SLOTS // 2)
    # The rest is fetched as ever.
    eventually(lambda: here.read(keys) == NUM_SLOTS)


def test_a_pushed_prompt_is_held_at_both_stores_until_it_is_read(
    linked: tuple[PeerStore, PeerStore],
) -> None:
    there, here = linked
    keys, hold = chain(0, 4), 7
    pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
    granted = there.client.exchange(reserve=pairs, hold=hold, num_readers=2).reserved
    slots = [slot for slot in granted if slot is not None]
    there.client.push(here.address, keys, b"", hold, 2)
    eventually(lambda: here.stats().promoting_slots == 4)
    finish(there, keys, slots)
    eventually(lambda: here.stats().received_blocks == 4)
    for store in linked:
        store.client.clear()
        assert store.stats().held_slots == 4
    for reader in range(2):
        assert [store.stats().num_holds for store in linked] == [1, 1]
        assert here.read(keys) == 4
        here.client.end_hold(hold, reader, there.address)
        eventually(lambda last=reader: there.stats().num_holds == 1 - last)
    assert [store.stats().held_slots for store in linked] == [0, 0]
    eventually(lambda: can_be_emptied(there, here))


def test_a_prompt_that_finds_no_room_at_the_peer_stays_where_it_is(
    linked: tuple[PeerStore, PeerStore],
) -> None:
    """It is fetched from there once what others wait for has been read."""
    there, here = linked
    others = chain(100, NUM_SLOTS)
    here.client.exchange(reserve=[(key, None) for key in others[:-1]], hold=1)
    keys, hold = chain(0, 4), 2
    pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
    slots = [s for s in there.client.exchange(reserve=pairs, hold=hold).reserved if s is not None]
    there.client.push(here.address, keys, b"", hold)
    finish(there, keys, slots)
    eventually(lambda: there.stats().pushed_blocks == 4)
    assert (here.stats().promoting_slots, here.stats().num_holds) == (0, 1)
    there.client.clear()
    found = here.client.exchange(acquire=keys)
    while found.undecided and not found.num_unfetched:
        found = here.client.exchange(acquire=keys)
    assert found.num_unfetched > 0


def test_no_peer_no_push(linked: tuple[PeerStore, PeerStore]) -> None:
    there, here = linked
    keys = chain(0, 2)
    slots = reserve(there, keys)
    there.client.push("127.0.0.1:1", keys)
    finish(there, keys, slots)
    assert states(there, keys) == [Lookup.HIT] * 2
    assert "which is no peer" in there.log.read_text()
    assert there.stats().pushed_blocks == here.stats().received_blocks == 0


def acquired(store: PeerStore, keys: Sequence[bytes]) -> Exchanged:
    """What a client gets once the store grants all of the blocks."""
    grants: list[Exchanged] = []

    def are_granted() -> bool:
        granted = store.client.exchange(acquire=keys)
        if len(granted.slots) == len(keys):
            grants.append(granted)
        elif granted.lease is not None:
            store.client.release(granted.lease)
        return bool(grants)

    eventually(are_granted)
    return grants[0]


@pytest.mark.parametrize(
    ("point", "at"), [(FailPoint.PEER_PUSH, "there"), (FailPoint.PEER_REQUEST, "here")]
)
@pytest.mark.parametrize("action", ["error", "kill"])
def test_a_failure_between_two_ranges(
    point: FailPoint,
    at: str,
    action: str,
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = [PeerStore(tmp_path, stack, name, start=start_store) for name in ("there", "here")]
    there, here = two
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    start(there, here)
    keys = chain(0, 4)
    slots = reserve(there, keys)
    there.client.push(here.address, keys)
    eventually(lambda: here.stats().promoting_slots == 4)
    for part in range(PARTS):
        fill(there, keys, slots, range(1), part)
    granted = acquired(here, keys)
    eventually(lambda: holds_first_layer(here, keys, granted.slots))
    assert granted.lease is not None
    here.client.release(granted.lease)
    # The next pass is that of the second range, however many layers it has.
    (tmp_path / point).write_text(action)
    is_dead = action == "kill"
    for part in range(PARTS):
        fill(there, keys, slots, range(1, NUM_LAYERS), part)
    eventually(lambda: not (tmp_path / point).exists())
    if is_dead and at == "there":
        eventually(lambda: states(here, keys) == [Lookup.MISS] * 4)
    else:
        for part in range(PARTS):
            assert there.client.commit(slots, part)
        assert states(there, keys) == [Lookup.HIT] * 4
        if not is_dead:
            eventually(lambda: here.read(keys) == 4)
    left = [one for one in two if not is_dead or one is not (there if at == "there" else here)]
    eventually(lambda: can_be_emptied(*left))


# ---- what the server makes of wrong messages


def offer(keys: Sequence[bytes], push_id: int = 1, num_bytes: int = SLOT_BYTES) -> OfferPush:
    return OfferPush(push_id, [NAMESPACE + key for key in keys], None, num_bytes, b"")


def pushing_to(store: PeerStore, stack: ExitStack) -> StreamChannel:
    host, _, port = store.address.rpartition(":")
    channel, _ = connect_to_peer((host, int(port)), KEY.encode())
    stack.callback(channel.close)
    return channel


def send(channel: StreamChannel, said: PeerRequest, *sizes: int) -> None:
    channel.send(message_of(said, *(np.zeros(size, np.uint8) for size in sizes)), 10.0)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([(PushRange(2, [0], 0), 8)], "not under way"),
        ([(PushRange(1, [0], 8), 8)], "not the next one"),
        ([(PushRange(1, [0], 0), 8), (PushRange(1, [0], 0), 8)], "not the next one"),
        ([(PushRange(1, [0], 0), SLOT_BYTES + 1)], "not the next one"),
        ([(PushRange(1, [5], 0), 8)], "not the next one"),
        ([(PushRange(1, [0], 0),)], "without its bytes"),
        ([(PushRange(1, [0, 0], 0), 8, 8)], "without its bytes"),
        ([(EndPush(1, [0], []),)], "has not come"),
        ([(PushRange(1, [0], 0), SLOT_BYTES - 1), (EndPush(1, [0], []),)], "has not come"),
        ([(EndPush(1, [], [0, 0]),)], "not on its way"),
        ([(EndPush(2, [], [0]),)], "not under way"),
    ],
)
def test_what_is_no_push_ends_the_connection_and_shows_nothing(
    messages: list[tuple[PeerRequest, int]],
    why: str,
    linked: tuple[PeerStore, PeerStore],
    stack: ExitStack,
) -> None:
    _, here = linked
    keys = chain(0, 2)
    channel = pushing_to(here, stack)
    wanted, _ = exchange(channel, offer(keys), 10.0)
    assert wanted == PushWanted([0, 1])
    assert states(here, keys) == [Lookup.PENDING] * 2
    for said, *sizes in messages:
        send(channel, said, *sizes)
    with pytest.raises(TransportError):
        channel.receive(DEADLINE_S)
    eventually(lambda: states(here, keys) == [Lookup.MISS] * 2)
    assert why in here.log.read_text()
    eventually(lambda: can_be_emptied(here))


def test_blocks_that_have_come_are_kept_where_the_rest_fails(
    linked: tuple[PeerStore, PeerStore], stack: ExitStack
) -> None:
    _, here = linked
    keys = chain(0, 3)
    channel = pushing_to(here, stack)
    exchange(channel, offer(keys), 10.0)
    send(channel, PushRange(1, [0, 1], 0), SLOT_BYTES, SLOT_BYTES)
    asked = AskBlocks([NAMESPACE + key for key in keys])
    # All is there, and nobody has said that it is right.
    assert exchange(channel, asked, 10.0)[0] == BlockStates(bytes([Lookup.PENDING] * 3))
    send(channel, EndPush(1, [0], []))
    eventually(lambda: states(here, keys[:1]) == [Lookup.HIT])
    channel.close()
    eventually(lambda: states(here, keys) == [Lookup.HIT, Lookup.MISS, Lookup.MISS])


@pytest.mark.parametrize(
    "wrong",
    [offer(chain(0, 1), num_bytes=SLOT_BYTES + 4096), offer(chain(0, 2), num_bytes=1)],
)
def test_blocks_of_another_size_are_not_wanted(
    wrong: OfferPush, linked: tuple[PeerStore, PeerStore], stack: ExitStack
) -> None:
    _, here = linked
    here.write(chain(50, 1))
    assert exchange(pushing_to(here, stack), wrong, 10.0)[0] == PushWanted([])
    assert here.stats().promoting_slots == 0


@pytest.mark.parametrize("two", [fork_store], ids=[""], indirect=True)
def test_a_sender_that_says_nothing_more_is_gone(
    linked: tuple[PeerStore, PeerStore], stack: ExitStack
) -> None:
    """It is held to more than one who only asks: readers wait for what it has begun."""
    _, here = linked
    keys = chain(0, 2)
    channel = pushing_to(here, stack)
    exchange(channel, offer(keys), 10.0)
    granted = here.client.exchange(acquire=keys)
    eventually(lambda: here.client.arrivals(granted.slots) == [Lookup.MISS] * 2)
    with pytest.raises(PeerGoneError):
        channel.receive(DEADLINE_S)


def test_a_stranger_offers_nothing(linked: tuple[PeerStore, PeerStore]) -> None:
    _, here = linked
    host, _, port = here.address.rpartition(":")
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(message_of(offer(chain(0, 2))).body)
    eventually(lambda: "turned away" in here.log.read_text())
    assert here.stats().promoting_slots == 0


def test_how_long_the_rest_takes_is_told_from_what_has_come() -> None:
    memory = {number: np.zeros(100, np.uint8) for number in range(4)}
    reception = Reception(OfferPush(1, chain(0, 4), None, 100, b""), memory, 10.0)
    assert reception.left_s(12.0) == 2.0
    ranges = PushRange(1, [0, 1], 0)
    reception.received(ranges, [Tensor("uint8", (100,), np.ones(100, np.uint8))] * 2)
    assert reception.left_s(13.0) == 3.0
    assert memory[0].all()
    assert memory[1].all()
    assert not memory[2].any()
    reception.ended([0], [2])
    assert reception.open == [1, 3]
    with pytest.raises(ProtocolError):
        reception.ended([0], [])


class Sink:
    """Takes every block, once ``go`` is set; keeps what each range was."""

    def __init__(self) -> None:
        self.go, self.is_over = threading.Event(), threading.Event()
        self.memory: dict[int, np.ndarray] = {}
        self.ranges: list[tuple[list[int], int, int]] = []

    def accept(self, offer: OfferPush) -> Reception:
        assert self.go.wait(60.0)
        self.memory = {n: np.zeros(offer.num_bytes, np.uint8) for n in range(len(offer.keys))}
        ranges = self.ranges

        class Noted(Reception):
            def received(self, message: PushRange, tensors: Sequence[Tensor]) -> None:
                super().received(message, tensors)
                ranges.append((list(message.numbers), message.first_byte, tensors[0].data.size))

        return Noted(offer, dict(self.memory), 0.0)

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        self.is_over.set()

    def close(self) -> None:
        pass


def test_a_link_that_is_behind_sends_many_layers_at_once() -> None:
    """Of the same blocks only, in order, and nothing twice."""
    sink, over = Sink(), Mailbox[Push]()
    server = PeerServer("127.0.0.1", 0, KEY.encode(), sink)  # type: ignore[arg-type]
    link = PushLink(("127.0.0.1", server.port), KEY.encode(), over)
    blocks = [block(key) for key in chain(0, 3)]
    push = Push(offer(chain(0, 3)), blocks)
    link.begin(push)
    for first in range(0, SLOT_BYTES, 1024):
        link.ready(push, [0, 1], first, first + 1024)
    link.ready(push, [2], 0, 1024)
    link.ready(push, [2], 1024, SLOT_BYTES)
    link.end(push, [0, 1, 2], [], is_last=True)
    sink.go.set()
    assert sink.is_over.wait(60.0)
    assert sink.ranges == [([0, 1], 0, SLOT_BYTES), ([2], 0, SLOT_BYTES)]
    for number, expected in enumerate(blocks):
        assert np.array_equal(sink.memory[number], expected)
    eventually(lambda: not over.is_empty)
    assert over.take() == [push]
    link.close()
    server.close()
    over.close()
