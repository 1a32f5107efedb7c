"""Migrations of paced engines take the time of the profile's link."""

from __future__ import annotations

import pytest

from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.units.context import Context
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.orchestrator.control.costs.profile import load
from banaserve.pacing.moves import PacedMoves
from banaserve.pacing.pacer import Pacer

TOKEN_BYTES = 8192
COPIED_BYTES = 1_000_000
DILATION = 2.0
B = 25e9
"""Bytes a second of the profile's link."""


class VirtualTime:
    """A clock that sleeps in no time."""

    now_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


@pytest.fixture
def pacer(time, tmp_path):
    profile = load("opt-13b-a100")
    return Pacer(profile, "d0", tmp_path, DILATION, lambda: time.now_s, time.sleep)


@pytest.fixture
def moves(pacer):
    """Where real moves are instantaneous, what is left is what pacing adds."""
    return PacedMoves(pacer, ModelGeometry(8, 2), TOKEN_BYTES)


def test_a_copy_takes_as_long_as_the_modelled_kv(moves, time):
    moves.copied(COPIED_BYTES, 0.0)
    modelled_s = COPIED_BYTES * 819_200 / TOKEN_BYTES / B
    assert time.now_s - 100 == pytest.approx(DILATION * modelled_s)


def test_what_a_copy_really_took_is_part_of_its_time(moves, time):
    modelled_s = DILATION * COPIED_BYTES * 819_200 / TOKEN_BYTES / B
    moves.copied(COPIED_BYTES, modelled_s / 4)
    assert time.now_s - 100 == pytest.approx(modelled_s * 3 / 4)
    moves.copied(COPIED_BYTES, 2 * modelled_s)
    assert time.now_s - 100 == pytest.approx(modelled_s * 3 / 4), "it was late already"


@pytest.mark.parametrize(
    ("modules", "num_layers"),
    [(LayerRange(2, 5), 15), (HeadSet({1: (0,)}), 0), (Context(2, 5), 0)],
)
def test_layers_bring_their_weights_and_others_none(moves, time, modules, num_layers):
    moves.built(modules, 0.0)
    assert time.now_s - 100 == pytest.approx(DILATION * num_layers * 629_278_720 / B)


def test_a_commit_stops_the_engine_for_one_synchronisation(moves, pacer, time):
    moves.committed()
    sync_s = DILATION * 5e-3
    assert time.now_s - 100 == pytest.approx(sync_s)
    assert pacer._device.free_s == pytest.approx(100 + sync_s), "its next step begins after it"
