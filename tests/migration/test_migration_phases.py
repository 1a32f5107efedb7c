"""The table of a move's phases, and what may move together."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.contracts.move_phase import ALLOWED, OPEN, ModelGeometry, MovePhase, check_step
from banaserve.migration.host.host import KEPT, MigrationHost, MoveBook
from banaserve.migration.host.move import Move
from banaserve.migration.host.time_hook import REAL_TIME
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.units.base import MigrationUnit, check_free, overlap
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.migration.units.registry import AnyUnit
from unit_doubles import unit_of

SHAPE = ModelGeometry(num_layers=30, num_kv_heads=3)
UNIT: Any = SimpleNamespace(unit_id="m", modules=LayerRange(3, 4), residence=None)


def test_every_phase_is_in_the_table() -> None:
    assert set(ALLOWED) == set(MovePhase)


def test_every_open_phase_can_be_given_up_and_no_other_can() -> None:
    for phase in MovePhase:
        assert (MovePhase.ABORTED in ALLOWED[phase]) == (phase in OPEN), phase
        assert phase not in OPEN or MovePhase.FAILED in ALLOWED[phase], phase


def test_committed_moves_only_free() -> None:
    assert ALLOWED[MovePhase.COMMITTED] == {MovePhase.FREEING}
    assert ALLOWED[MovePhase.FREEING] == {MovePhase.FREED, MovePhase.FAILED}
    assert not ALLOWED[MovePhase.FREED]


@given(st.lists(st.sampled_from(MovePhase), max_size=12))
def test_walks_follow_the_table_and_commit_once(wanted: list[MovePhase]) -> None:
    now, walk = MovePhase.PREPARING, [MovePhase.PREPARING]
    for phase in wanted:
        if phase in ALLOWED[now]:
            check_step("m", now, phase)
            now = phase
            walk.append(now)
        else:
            with pytest.raises(MigrationError, match=phase.value):
                check_step("m", now, phase)
    assert walk.count(MovePhase.COMMITTED) <= 1
    assert MovePhase.FREED not in walk or MovePhase.COMMITTED in walk
    if MovePhase.COMMITTED in walk:
        assert MovePhase.PREPARED in walk[: walk.index(MovePhase.COMMITTED)]
        assert MovePhase.ABORTED not in walk


ranges = st.tuples(st.integers(0, 29), st.integers(1, 30)).map(
    lambda ends: LayerRange(min(ends[0], ends[1] - 1), ends[1])
)
head_sets = st.dictionaries(
    st.integers(0, 29), st.sets(st.integers(0, 2), min_size=1).map(sorted).map(tuple), min_size=1
).map(HeadSet)
modules = st.one_of(ranges, head_sets)


def cells(modules: MigrationUnit) -> set[tuple[int, int]]:
    """Every (layer, KV head) that is in it."""
    if isinstance(modules, LayerRange):
        return set(itertools.product(modules.layers, range(3)))
    return {(layer, head) for layer, heads in modules.heads.items() for head in heads}


@given(modules, modules)
def test_overlap_is_a_shared_head_or_a_layer_that_goes_as_a_whole(
    one: MigrationUnit, other: MigrationUnit
) -> None:
    assert (overlap(one, other) is not None) == bool(cells(one) & cells(other))
    assert (overlap(one, other) is None) == (overlap(other, one) is None)


@given(st.lists(modules, max_size=8))
def test_units_that_were_let_in_never_share_anything(wanted: list[MigrationUnit]) -> None:
    held: dict[str, MigrationUnit] = {}
    for number, one in enumerate(wanted):
        try:
            check_free(one, held)
        except MigrationError:
            continue
        held[f"m{number}"] = one
    found = [cells(one) for one in held.values()]
    assert sum(map(len, found)) == len(set().union(*found))


@given(modules)
def test_modules_survive_the_wire(one: MigrationUnit) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=AnyUnit) == one


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (LayerRange(3, 3), "empty"),
        (LayerRange(-1, 2), "outside"),
        (LayerRange(29, 31), "outside"),
        (HeadSet({}), "no heads"),
        (HeadSet({1: ()}), "no heads of layer 1"),
        (HeadSet({1: (0, 0)}), "twice"),
        (HeadSet({1: (3,)}), "no KV head 3"),
        (HeadSet({30: (0,)}), "no layer 30"),
    ],
)
def test_what_the_model_does_not_have_is_refused(wrong: MigrationUnit, why: str) -> None:
    with pytest.raises(MigrationError, match=why):
        wrong.check(SHAPE)


def test_a_book_forgets_moves_that_are_over_and_no_others() -> None:
    book = MoveBook()
    first = Move("first", UNIT, None)
    book.add(first)
    for number in range(3 * KEPT):
        move = Move(f"m{number}", UNIT, None)
        book.add(move)
        move.enter(MovePhase.ABORTED)
        assert book.get(move.move_id) is move, "what has just ended can be asked about"
    assert len(list(book)) == KEPT + 2
    assert book.get("first") is first, "it is under way"
    with pytest.raises(MigrationError, match="no move m0"):
        book.get("m0")
    with pytest.raises(MigrationError, match="already"):
        book.add(Move("first", UNIT, None))


@pytest.mark.parametrize("phase", MovePhase)
def test_a_move_that_works_is_never_over(phase: MovePhase) -> None:
    move = Move("m", UNIT, None)
    move._phase = phase
    assert move.is_over == (phase not in OPEN | {MovePhase.FREEING})


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_move_home_that_ends_early_leaves_no_memory_backed(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """The second layer gets no memory, as if cuMemCreate had none; or the move is aborted."""
    host = HostKv({name: torch.ones(8, 2, 16, 64) for name in ("l0", "l1", "l2")}, 1.0)
    unit = unit_of(LayerRange(0, 2), host)
    unit.free()
    resident_bytes, populate = host.resident_bytes, host.populate
    link, kv = SimpleNamespace(lost=None), SimpleNamespace()
    monkeypatch.setattr(unit, "residence", SimpleNamespace(link=link, kv=kv))

    def refuse(name: str, num_blocks: int) -> None:
        if is_refused and name == "l1":
            raise MemoryError("std::bad_alloc")
        populate(name, num_blocks)
        host.tensors[name][:] = 1  # some kernels back memory on first touch only

    monkeypatch.setattr(host, "populate", refuse)
    move = Move("m", unit, None)
    move.prepare(host, DirtyBlockTracker(8), REAL_TIME)
    assert move.join(60.0)
    if is_refused:
        assert (move.phase, move.error) == (
            MovePhase.FAILED,
            "there is no memory for its KV at home",
        )
    else:
        assert host.resident_bytes > resident_bytes
        move.enter(MovePhase.ABORTED)
        move.give_up()
    assert host.resident_bytes == resident_bytes


def test_a_unit_stays_until_an_aborted_move_of_it_has_stopped() -> None:
    """Its thread would free the room at home that the next move has filled."""
    goes_on = threading.Event()
    place = SimpleNamespace(link=SimpleNamespace(lost=None), kv=None)
    freed: list[str] = []
    unit: Any = SimpleNamespace(
        unit_id="u",
        residence=place,
        names=(),
        make_room=goes_on.wait,
        free=lambda: freed.append("u"),
    )
    move, begun = Move("m1", unit, None), []
    move.prepare(SimpleNamespace(), DirtyBlockTracker(8), REAL_TIME)  # type: ignore[arg-type]
    move.enter(MovePhase.ABORTED)
    move.give_up()
    host: Any = SimpleNamespace(
        placement=[unit], moves=[move], _begin=lambda *moved: begun.append(moved)
    )
    with pytest.raises(MigrationError, match="u is moving"):
        MigrationHost.prepare_again(host, "m2", "u", None)
    goes_on.set()
    assert move.join(60.0)
    assert freed == ["u"]
    MigrationHost.prepare_again(host, "m2", "u", None)
    assert begun == [("m2", unit, None)]


class _Noticed:
    """A lock that tells when somebody wants it."""

    def __init__(self, lock: Any, is_wanted: threading.Event) -> None:
        self._lock, self._is_wanted = lock, is_wanted

    def __enter__(self) -> None:
        self._is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_an_abort_as_a_phase_ends_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the thread's look at the phase and the thread's change of it."""
    is_wanted, has_begun = threading.Event(), threading.Event()
    aborts: list[threading.Thread] = []

    def abort() -> None:
        move.enter(MovePhase.ABORTED)
        is_wanted.set()

    def is_open(move: Move) -> bool:
        found = move.phase in OPEN
        if found and threading.current_thread().name == "move-m1":
            is_wanted.clear()
            aborts.append(threading.Thread(target=abort))
            aborts[0].start()
            assert is_wanted.wait(60.0)
        return found

    monkeypatch.setattr(Move, "is_open", property(is_open))
    unit: Any = SimpleNamespace(unit_id="u", residence=None, make_room=has_begun.wait, names=())
    move = Move("m1", unit, None)
    move._ending = _Noticed(move._ending, is_wanted)  # type: ignore[assignment]
    monkeypatch.setattr("banaserve.migration.host.move.BlockMover", lambda *_: None)
    move.prepare(SimpleNamespace(), DirtyBlockTracker(8), REAL_TIME)  # type: ignore[arg-type]
    has_begun.set()
    assert move.join(60.0)
    aborts[0].join(60.0)
    assert move.phase is MovePhase.ABORTED


def test_units_of_a_lost_guest_come_home_only_if_all_have_memory_there() -> None:
    """vLLM goes on after a call that failed, and a step must not touch KV that is not backed."""
    free, closed, home = [2], [], []

    def unit(number: int) -> Any:
        def make_room() -> None:
            if number >= free[0]:
                raise MemoryError("std::bad_alloc")

        kv = SimpleNamespace(close=lambda: closed.append(number))
        residence = SimpleNamespace(kv=kv)
        return SimpleNamespace(modules=number, residence=residence, make_room=make_room)

    away = [unit(number) for number in range(3)]
    host: Any = SimpleNamespace(
        moves=[],
        kv=SimpleNamespace(must_be_backed=True),
        placement=SimpleNamespace(at=lambda _: away, put=lambda unit, _: home.append(unit)),
        num_guests_lost=0,
        epoch=1,
        step_context=SimpleNamespace(dirty_blocks=DirtyBlockTracker(8)),
        lost_steps=SimpleNamespace(kv_lost=lambda: None),
        _take_home_lost=lambda: None,
    )
    lost: Any = None
    with pytest.raises(MemoryError):
        MigrationHost.guest_lost(host, lost, GuestLostError("gone"))
    assert not home
    assert not closed
    free[0] = 3
    MigrationHost.guest_lost(host, lost, GuestLostError("gone"))
    assert (home, closed) == (away, [0, 1, 2])
