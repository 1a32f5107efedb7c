"""Migrations of paced engines take the time of the profile's link."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from banaserve.costs.profile import load
from banaserve.engine.vllm.emulation import install
from banaserve.engine.vllm.emulation.pacer import Pacer
from banaserve.engine.vllm.migration.host.block_mover import BlockMover
from banaserve.engine.vllm.migration.host.host import MigrationHost
from banaserve.engine.vllm.migration.host.unit_builder import UnitBuilder
from banaserve.engine.vllm.migration.types import ModelGeometry
from banaserve.engine.vllm.migration.units.heads import HeadSet
from banaserve.engine.vllm.migration.units.layers import LayerRange
from banaserve.engine.vllm.migration.worker_api import MoveFacts

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
def pacer(time, tmp_path, monkeypatch):
    """Real moves are instantaneous here; what is left is what pacing adds."""
    monkeypatch.setattr(BlockMover, "copy", lambda mover, blocks: COPIED_BYTES)
    monkeypatch.setattr(UnitBuilder, "build", lambda builder, unit, guest: f"{unit.modules}")
    facts = MoveFacts(swap_s=0.5, stall_s=1.5)
    monkeypatch.setattr(MigrationHost, "commit", lambda host, name: SimpleNamespace(facts=facts))
    profile = load("opt-13b-a100")
    made = Pacer(profile, "d0", tmp_path, DILATION, lambda: time.now_s, time.sleep)
    install.pace_moves(made, ModelGeometry(8, 2), TOKEN_BYTES)
    return made


def test_a_copy_takes_as_long_as_the_modelled_kv(pacer, time):
    mover = object.__new__(BlockMover)
    mover.seconds = 0.0
    assert mover.copy([1, 2]) == COPIED_BYTES
    modelled_s = COPIED_BYTES * 819_200 / TOKEN_BYTES / B
    assert time.now_s - 100 == pytest.approx(DILATION * modelled_s)
    assert mover.seconds == pytest.approx(DILATION * modelled_s)


@pytest.mark.parametrize(
    ("modules", "num_layers"), [(LayerRange(2, 5), 15), (HeadSet({1: (0,)}), 0)]
)
def test_layers_bring_their_weights_and_heads_none(pacer, time, modules, num_layers):
    unit = SimpleNamespace(modules=modules)
    assert object.__new__(UnitBuilder).build(unit, None) == str(modules)
    assert time.now_s - 100 == pytest.approx(DILATION * num_layers * 629_278_720 / B)


def test_a_commit_stops_the_engine_for_one_synchronisation(pacer, time):
    move = object.__new__(MigrationHost).commit("m1")
    sync_s = DILATION * 5e-3
    assert time.now_s - 100 == pytest.approx(sync_s)
    assert move.facts.swap_s == pytest.approx(0.5 + sync_s)
    assert move.facts.stall_s == pytest.approx(1.5 + sync_s)
