"""Blocks of a unit between a host and guests, over shared memory."""

from __future__ import annotations

import errno
import mmap
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.migration.host import block_mover
from banaserve.migration.host.block_mover import BlockMover
from banaserve.migration.host.move import build_in_guest
from banaserve.migration.host.time_hook import REAL_TIME, TimeHook
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker
from banaserve.migration.kv.host_kv import HostKv, KvRun
from banaserve.migration.kv.remote_kv import BACKGROUND_GRACE_S, STEP_GRACE_S, RemoteKv
from banaserve.migration.kv.store_copier import StoreCopier
from banaserve.migration.rpc import messages
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.context import Context
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.host_unit import HostUnit
from banaserve.migration.units.layers import LayerRange
from banaserve.transport.errors import PeerGoneError
from banaserve.transport.interface import Transport, TransportOptions
from banaserve.transport.regions.offered_region import OfferedRegion
from banaserve.transport.registry import create
from unit_doubles import unit_of

PAGE = mmap.PAGESIZE
NUM_BLOCKS = 5
LAYERS = LayerRange(0, 3)
HEADS = HeadSet({0: (1,), 2: (0, 2)})


@pytest.fixture
def host() -> HostKv:
    """Three layers of three heads, one page each; every byte tells where it belongs."""
    shape = (NUM_BLOCKS, 3, PAGE // 8, 2)
    kv = HostKv({f"l{i}": torch.zeros(shape) for i in range(3)}, 1.0)
    for layer, tensor in enumerate(kv.tensors.values()):
        for block in range(NUM_BLOCKS):
            for head in range(3):
                tensor[block, head] = 100 * layer + 10 * block + head
    return kv


@pytest.fixture
def transports(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    options = TransportOptions(folder=str(tmp_path), secret=secrets.token_bytes(32))
    both = create("shm", options), create("shm", options)
    yield both
    for one in both:
        one.close()


class Place:
    """A guest's memory, and the host's way to it."""

    def __init__(
        self, host: HostKv, unit: HostUnit, transports: tuple[Transport, Transport]
    ) -> None:
        runs = {name: host.runs(unit.heads(name)) for name in unit.names}
        places, end = {}, 0
        for name, found in runs.items():
            places[name] = end
            end += NUM_BLOCKS * sum(run.num_bytes for run in found)
        self.offered: OfferedRegion = transports[1].offer(end, 1)
        self.kv = RemoteKv(transports[0], self.offered.descriptor, places, runs)


def heads_of(unit: HostUnit, name: str) -> list[int]:
    return list(unit.heads(name) or range(3))


@pytest.mark.parametrize("modules", [LAYERS, HEADS], ids=["layers", "heads"])
@pytest.mark.parametrize("round_bytes", [1, 64 << 20], ids=["block by block", "at once"])
def test_blocks_go_on_to_another_guest_and_home(
    host: HostKv, transports: tuple[Transport, Transport], modules: MigrationUnit, round_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(block_mover, "_ROUND_BYTES", round_bytes)
    unit, blocks = unit_of(modules, host), [0, 1, 3]
    before = {name: tensor.clone() for name, tensor in host.tensors.items()}
    one, other = (Place(host, unit, transports) for _ in range(2))
    one.kv.warm(blocks)
    size = len(blocks) * PAGE * sum(len(heads_of(unit, name)) for name in unit.names)
    assert BlockMover(unit, host, None, one.kv).copy(blocks) == size
    assert BlockMover(unit, host, one.kv, other.kv).copy(blocks) == size
    for name in unit.names:
        host.tensors[name][:, heads_of(unit, name)] = -1
    assert BlockMover(unit, host, other.kv, None).copy(blocks) == size
    for name, tensor in host.tensors.items():
        moved = heads_of(unit, name) if name in unit.names else []
        kept = [head for head in range(3) if head not in moved]
        assert torch.equal(tensor[:, kept], before[name][:, kept])
        assert torch.equal(tensor[blocks][:, moved], before[name][blocks][:, moved])
        assert (tensor[[2, 4]][:, moved] == -1).all(), "blocks that were not copied"


def test_what_has_been_copied_is_known_while_a_copy_is_under_way(
    host: HostKv, transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mover, "_ROUND_BYTES", 1)
    unit, seen = unit_of(LAYERS, host), []
    mover = BlockMover(unit, host, None, Place(host, unit, transports).kv)

    def stop() -> bool:
        seen.append(mover.num_bytes)
        return False

    for _ in range(2):
        mover.copy([0, 1, 3], stop)
    assert seen == [number * mover.each_bytes for number in range(6)]
    assert mover.each_bytes > 0


def test_older_blocks_that_have_come_home_are_left_alone(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    unit = unit_of(Context(0, 3), host)
    away = unit.single_blocks
    assert away is not None
    before = {name: tensor.clone() for name, tensor in host.tensors.items()}
    one, other = (Place(host, unit, transports) for _ in range(2))
    assert BlockMover(unit, host, None, one.kv).copy([0, 1, 3]) == 3 * 9 * PAGE
    away.set([0, 1, 3])
    away.mark_local([1, 2])
    for tensor in host.tensors.values():
        tensor[:] = -1
    every = list(range(NUM_BLOCKS))
    assert BlockMover(unit, host, one.kv, other.kv).copy(every) == 2 * 9 * PAGE
    assert BlockMover(unit, host, other.kv, None).copy(every) == 2 * 9 * PAGE
    for name, tensor in host.tensors.items():
        assert torch.equal(tensor[[0, 3]], before[name][[0, 3]])
        assert (tensor[[1, 2, 4]] == -1).all()


def test_the_store_saves_a_block_from_where_it_lies_and_fetches_it_home(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    dirty_blocks, unit = DirtyBlockTracker(NUM_BLOCKS), unit_of(Context(0, 3), host)
    away = unit.single_blocks
    assert away is not None
    dirty_blocks.follow(away)
    guest, page_bytes = Place(host, unit, transports).kv, host.page_bytes
    before = host.tensors["l1"].clone()
    BlockMover(unit, host, None, guest).copy([0, 1, 3])
    away.set([0, 3])
    host.tensors["l1"][[0, 3]] = float("nan")
    pool = np.zeros((4, 3 * page_bytes), np.uint8)
    view: Any = SimpleNamespace(
        base_address=pool.ctypes.data,
        memory=SimpleNamespace(size=pool.nbytes),
        slot_bytes=3 * page_bytes,
        fingerprint=SimpleNamespace(offset_bytes=lambda layer: layer * page_bytes),
    )
    fetched: list[Any] = []
    inner: Any = SimpleNamespace(is_synchronous=True, load=lambda *what: fetched.append(what[2]))
    lost: list[GuestLostError] = []
    here = [(KvRun(0, page_bytes), None)]
    copier = StoreCopier(
        inner, ["l0", "l1", "l2"], host, dirty_blocks, lambda _: here, lambda _: (away, guest), 0,
        lost.append,
    )  # fmt: skip
    copier.save(1, view, [0, 1, 3], [2, 0, 1], None)
    assert lost == []
    saved = pool[:, page_bytes : 2 * page_bytes].copy().view(np.float32)
    for block, slot in ((0, 2), (1, 0), (3, 1)):
        assert (saved[slot] == before[block].flatten().numpy()).all()
    assert not pool[:, :page_bytes].any(), "no other layer"
    copier.load(1, view, [3, 4], [0, 1], None)
    assert fetched == [[3, 4]]
    assert away.ids() == [0], "a fetched block is at home"
    dirty_blocks.step_ended()
    assert dirty_blocks.full() == [3, 4]


def test_a_copy_stops_between_two_submissions(
    host: HostKv, transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mover, "_ROUND_BYTES", 1)
    unit = unit_of(LAYERS, host)
    mover = BlockMover(unit, host, None, Place(host, unit, transports).kv)
    answers = iter([False, False, True])
    assert mover.copy([0, 1, 2, 3], lambda: next(answers)) == 2 * 9 * PAGE


class PatientTicket:
    """A copy that ends at once, and notes how long it would have been waited for."""

    def __init__(self) -> None:
        self.patience_s: list[float] = []

    def wait(self, timeout_s: float) -> None:
        self.patience_s.append(timeout_s)


@pytest.mark.parametrize("to_guest", [True, False], ids=["to a guest", "from a guest"])
def test_only_what_no_step_can_wait_for_bears_a_guest_that_stands_still(
    host: HostKv, to_guest: bool
) -> None:
    ticket = PatientTicket()
    kv: Any = SimpleNamespace(copy=lambda *_, **__: [ticket])
    mover = BlockMover(unit_of(LAYERS, host), host, *((None, kv) if to_guest else (kv, None)))
    mover.copy([0])
    mover.copy([0], in_background=True)
    in_step, beside_steps = map(round, ticket.patience_s)
    assert in_step == STEP_GRACE_S
    assert beside_steps == (BACKGROUND_GRACE_S if to_guest else STEP_GRACE_S)


def test_a_broken_connection_is_opened_again_as_long_as_the_guest_offers(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    unit = unit_of(LAYERS, host)
    place = Place(host, unit, transports)
    mover = BlockMover(unit, host, None, place.kv)
    mover.copy([0])
    place.kv._bulk.region.close()
    assert mover.copy([1]) == 9 * PAGE
    page = place.offered.memory.view()[3 * PAGE : 4 * PAGE].view("float32")
    assert (page == 10).all(), "block 1 of layer 0, head 0"
    place.offered.close()
    for _ in range(2):
        with pytest.raises(GuestLostError):
            mover.copy([2])


def test_what_is_closed_stays_closed(host: HostKv, transports: tuple[Transport, Transport]) -> None:
    unit = unit_of(LAYERS, host)
    place = Place(host, unit, transports)
    place.kv.close()
    with pytest.raises(GuestLostError, match="closed"):
        BlockMover(unit, host, None, place.kv).copy([0])


def test_copies_of_an_old_epoch_are_refused(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    unit = unit_of(HEADS, host)
    place = Place(host, unit, transports)
    place.offered.advance(2, 1.0)
    mover = BlockMover(unit, host, None, place.kv)
    with pytest.raises(GuestLostError, match="epoch 2"):
        mover.copy([0])
    place.kv.epoch = 2
    assert mover.copy([0]) == 3 * PAGE


class Link:
    """A guest that builds everything in one region, and notes what it is asked."""

    def __init__(self, transport: Transport, region: OfferedRegion) -> None:
        self.transport = transport
        self.asked: list[str] = []
        self.given_up = ""
        places = dict.fromkeys(("l0", "l1", "l2"), 0)
        self._built = messages.Built(region.descriptor, places, 1)

    def ask(self, request: Any, expected: Any, *_: Any, **__: Any) -> Any:
        self.asked.append(type(request).__name__)
        return self._built if expected is messages.Built else messages.StepsDone()

    def give_up(self, reason: str) -> GuestLostError:
        self.given_up = reason
        return GuestLostError(reason)


class Pieces(TimeHook):
    """Takes down what has been done."""

    def __init__(self) -> None:
        self.done: list[object] = []

    def copied(self, num_bytes: int, took_s: float) -> None:
        assert took_s >= 0
        self.done.append(num_bytes)

    def built(self, modules: MigrationUnit, took_s: float) -> None:
        assert took_s >= 0
        self.done.append(modules)


def build(host: HostKv, link: Any, time_hook: TimeHook = REAL_TIME) -> Any:
    dirty_blocks = DirtyBlockTracker(NUM_BLOCKS)
    dirty_blocks.mark([1])
    return build_in_guest(unit_of(LAYERS, host), link, host, dirty_blocks, time_hook)


def test_the_time_hook_is_told_of_each_piece_that_was_done(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    pieces, unit = Pieces(), unit_of(LAYERS, host)
    place: Any = Place(host, unit, transports)
    mover = BlockMover(unit, host, None, place.kv, pieces)
    mover.copy([0, 1, 3])
    mover.copy([])
    assert pieces.done == [3 * 9 * PAGE, 0]
    build(host, Link(transports[0], transports[1].offer(NUM_BLOCKS * 9 * PAGE, 1)), pieces)
    assert pieces.done[2:] == [LAYERS]


def test_the_time_hook_hears_nothing_of_what_failed(
    host: HostKv, transports: tuple[Transport, Transport]
) -> None:
    pieces = Pieces()
    link = Link(transports[0], transports[1].offer(NUM_BLOCKS * 9 * PAGE, 1))
    transports[1].close()
    with pytest.raises((MigrationError, GuestLostError)):
        build(host, link, pieces)
    assert pieces.done == []


def test_a_unit_whose_kv_cannot_be_mapped_leaves_nothing_behind(
    host: HostKv, transports: tuple[Transport, Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(transports[0], transports[1].offer(NUM_BLOCKS * 9 * PAGE, 1))

    def no_memory(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("banaserve.transport.regions.shared_file.populate", no_memory)
    with pytest.raises(MigrationError, match="Cannot allocate memory"):
        build(host, link)
    assert link.asked == ["Build", "ReleaseUnit"]
    assert not link.given_up
    assert not transports[0]._opened  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [PeerGoneError("gone"), OSError(errno.EMFILE, "no room")])
def test_a_region_that_opens_once_only_fails_the_move_alone(
    host: HostKv,
    transports: tuple[Transport, Transport],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = Link(transports[0], transports[1].offer(NUM_BLOCKS * 9 * PAGE, 1))
    open_region, opened = transports[0].open, []

    def once(*arguments: Any) -> Any:
        if opened:
            raise error
        opened.append(open_region(*arguments))
        return opened[0]

    monkeypatch.setattr(transports[0], "open", once)
    with pytest.raises(MigrationError, match=r"out of reach: .*(gone|no room)"):
        build(host, link)
    assert link.asked == ["Build", "ReleaseUnit"]
    assert not link.given_up
    assert not transports[0]._opened  # type: ignore[attr-defined]
