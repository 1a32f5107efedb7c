"""What a request moves, given what is away; how long a phase may take; whether there is room."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from banaserve.base.errors import MigrationError
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.migration.worker_api import KvStatus
from banaserve.serving.moves.move_plan import (
    _ALLOWED,
    MAX_TIMEOUT_S,
    RemoteUnit,
    UnitMove,
    copies_again,
    plan_move,
    plan_return,
    timeout_s,
)
from banaserve.serving.moves.sizes import (
    GUEST_BYTES,
    ModelFacts,
    _checkpoint_layer_bytes,
    check_room,
)

SHAPE = ModelGeometry(30, 3)
LAYERS = LayerRange
P0_10_15 = RemoteUnit("m1.0", LAYERS(10, 15), "p0")
P1_10_15 = RemoteUnit("m1.0", LAYERS(10, 15), "p1")
P1_5_15 = RemoteUnit("m1.0", LAYERS(5, 15), "p1")
P0_HEADS = RemoteUnit("m2.0", HeadSet({5: (1, 2)}), "p0")
P1_HEADS = RemoteUnit("m2.0", HeadSet({5: (1, 2), 6: (0,)}), "p1")


@pytest.mark.parametrize(
    ("wanted", "away", "steps"),
    [
        (LAYERS(10, 20), [], [UnitMove(LAYERS(10, 20))]),
        (LAYERS(10, 20), [P0_10_15], [UnitMove(LAYERS(15, 20))]),
        (LAYERS(8, 20), [P0_10_15], [UnitMove(LAYERS(8, 10)), UnitMove(LAYERS(15, 20))]),
        (
            LAYERS(10, 20),
            [P1_10_15],
            [UnitMove(LAYERS(10, 15), "m1.0"), UnitMove(LAYERS(15, 20))],
        ),
        (LAYERS(15, 20), [P1_5_15], [UnitMove(LAYERS(15, 20))]),
        (HeadSet({5: (1,)}), [], [UnitMove(HeadSet({5: (1,)}))]),
        (HeadSet({5: (0, 1, 2)}), [P0_HEADS], [UnitMove(HeadSet({5: (0,)}))]),
        (
            HeadSet({5: (1, 2), 6: (0, 1)}),
            [P1_HEADS],
            [UnitMove(P1_HEADS.modules, "m2.0"), UnitMove(HeadSet({6: (1,)}))],
        ),
        (LAYERS(10, 20), [P0_HEADS], [UnitMove(LAYERS(10, 20))]),
    ],
)
def test_only_what_is_not_there_yet_moves(wanted, away, steps):
    assert plan_move(wanted, "p0", SHAPE, away, {}) == steps


@pytest.mark.parametrize(
    ("wanted", "away", "moving", "reason"),
    [
        (LAYERS(10, 10), [], {}, "empty"),
        (LAYERS(20, 10), [], {}, "empty"),
        (LAYERS(25, 31), [], {}, "outside of 0:30"),
        (LAYERS(0, 30), [], {}, "keep at least one"),
        (LAYERS(0, 10), [RemoteUnit("u", LAYERS(10, 30), "p1")], {}, "keep at least one"),
        (LAYERS(0, 10), [], {"m7": [LAYERS(10, 30)]}, "keep at least one"),
        (LAYERS(10, 15), [P0_10_15], {}, "run beside p0 already"),
        (LAYERS(10, 20), [P1_5_15], {}, "as one unit"),
        (LAYERS(5, 8), [P0_HEADS], {}, "return them before"),
        (HeadSet({12: (0,)}), [P0_10_15], {}, "return them before"),
        (HeadSet({5: (1,)}), [P1_HEADS], {}, "as one unit"),
        (HeadSet({5: (3,)}), [], {}, "no KV head 3"),
        (HeadSet({30: (1,)}), [], {}, "no layer 30"),
        (HeadSet({5: (1, 1)}), [], {}, "twice"),
        (HeadSet({5: ()}), [], {}, "no heads of layer 5"),
        (HeadSet({}), [], {}, "no heads"),
        (LAYERS(10, 20), [], {"m7": [LAYERS(19, 22)]}, "layer 19 is on its way in migration m7"),
        (HeadSet({5: (1,)}), [], {"m7": [HeadSet({5: (1,)})]}, "in migration m7"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(wanted, away, moving, reason):
    with pytest.raises(MigrationError, match=reason):
        plan_move(wanted, "p0", SHAPE, away, moving)


def test_heads_of_one_layer_may_move_beside_each_other():
    moving = {"m7": [HeadSet({5: (1,)})]}
    wanted = HeadSet({5: (0, 2)})
    assert plan_move(wanted, "p0", SHAPE, [], moving) == [UnitMove(wanted)]


def test_return_takes_whole_units():
    away = [P0_10_15, P0_HEADS]
    assert plan_return(None, SHAPE, away, {}) == [
        UnitMove(P0_10_15.modules, "m1.0"),
        UnitMove(P0_HEADS.modules, "m2.0"),
    ]
    assert [s.unit_id for s in plan_return(LAYERS(0, 20), SHAPE, [P0_10_15], {})] == ["m1.0"]
    assert [s.unit_id for s in plan_return(LAYERS(5, 15), SHAPE, away, {})] == ["m1.0", "m2.0"]
    for wanted, reason in [
        (LAYERS(10, 12), "return all of it"),
        (LAYERS(20, 22), "nothing of layers 20:22 is away"),
        (HeadSet({5: (1,)}), "return all of it"),
        # No server has the memory for a set of so many layers.
        (LAYERS(0, 10**12), "outside of 0:30"),
    ]:
        with pytest.raises(MigrationError, match=reason):
            plan_return(wanted, SHAPE, away, {})
    with pytest.raises(MigrationError, match="nothing is away"):
        plan_return(None, SHAPE, [], {})
    with pytest.raises(MigrationError, match="on its way in migration m9"):
        plan_return(None, SHAPE, away, {"m9": [LAYERS(10, 15)]})


def test_pages():
    assert LAYERS(3, 7).num_pages(3) == 4.0
    assert HeadSet({1: (0, 2), 4: (1,)}).num_pages(3) == 1.0


def test_timeouts_grow_with_the_bytes_and_end():
    for phase in _ALLOWED:
        times = [timeout_s(phase, n) for n in (0, 10**6, 10**9, 10**12)]
        assert times == sorted(times)
        assert times[0] < times[2]
        assert times[0] > 0
        assert times[-1] <= MAX_TIMEOUT_S
    assert timeout_s("preparing", 10**18) == MAX_TIMEOUT_S


@pytest.mark.parametrize(
    ("before", "now", "times", "again"),
    [
        (None, 0, 1, False),
        (None, 9, 1, True),
        (20, 9, 2, True),
        (20, 10, 2, False),
        (20, 30, 2, False),
        (200, 1, 8, False),
    ],
)
def test_copies_are_repeated_while_less_than_half_is_left(before, now, times, again):
    assert copies_again(before, now, times) is again


def test_room_on_the_target():
    facts = ModelFacts(30, 3, layer_weight_bytes=1000)
    kv = KvStatus(
        num_blocks=100,
        max_blocks=200,
        blocks_gained=0,
        page_bytes=3000,
        num_layers=30,
        resident_bytes=None,
        written_blocks=0,
    )
    layers, heads = 10 * 1000 + 10 * 100 * 3000, 2 * 100 * 1000
    assert check_room(LAYERS(0, 10), "p0", facts, kv, 1 << 40) == layers
    assert check_room(HeadSet({5: (1, 2)}), "p0", facts, kv, 1 << 40) == heads
    assert check_room(LAYERS(0, 10), "p0", facts, kv, GUEST_BYTES + layers) == layers
    with pytest.raises(MigrationError, match=r"p0 has no room for layers 0:10: they take"):
        check_room(LAYERS(0, 10), "p0", facts, kv, GUEST_BYTES + layers - 1)
    two = GUEST_BYTES * 2 + layers
    assert check_room(LAYERS(0, 10), "p0", facts, kv, two, 2) == layers
    with pytest.raises(MigrationError, match="p0 has no room"):
        check_room(LAYERS(0, 10), "p0", facts, kv, two - 1, 2)


def test_weights_of_a_layer_are_read_from_the_checkpoint(tmp_path: Path):
    def tensor(dtype: str, num_bytes: int) -> dict[str, object]:
        return {"dtype": dtype, "shape": [], "data_offsets": [0, num_bytes]}

    header = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": tensor("BF16", 1000),
        "model.layers.0.mlp.weight": tensor("BF16", 60),
        "model.layers.0.norm.weight": tensor("F32", 8),
        "model.layers.1.mlp.weight": tensor("I8", 50),
    }
    encoded = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    assert _checkpoint_layer_bytes(tmp_path, 4) == 60 * 2 + 8
    assert _checkpoint_layer_bytes(tmp_path, 1) == 50
    path.write_bytes(struct.pack("<Q", 1 << 40))
    assert _checkpoint_layer_bytes(tmp_path, 4) is None
    assert _checkpoint_layer_bytes(tmp_path / "none", 4) is None
