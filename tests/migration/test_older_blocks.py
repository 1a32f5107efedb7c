"""Which blocks are away, and what of them can be asked for."""

from __future__ import annotations

import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from banaserve.base.errors import MigrationError
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.migration.units.context import Context
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.serving.moves.move_plan import RemoteUnit, UnitMove, plan_move, plan_return
from depth import num_examples

Write = tuple[str, list[tuple[int, int]]]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("step", "load", "commit", "forget")),
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=4, unique_by=lambda w: w[0]
        ),
    ),
    max_size=30,
)


@pytest.mark.parametrize("is_on_gpu", [False, True])
@settings(max_examples=num_examples(40), deadline=None)
@given(STEPS)
def test_a_block_leaves_full_and_comes_home_when_it_is_written(
    is_on_gpu: bool, steps: list[Write]
) -> None:
    """Against the plain meaning: tokens in each block, three of which fill it."""
    dirty_blocks, home = DirtyBlockTracker(6), []
    away = RemoteBlocks(6, lambda blocks: home.extend(blocks.tolist()))
    dirty_blocks.follow(away)
    fill, gone = dict.fromkeys(range(6), 0), set()
    for kind, changes in steps:
        home.clear()
        blocks = [block for block, _ in changes]
        if kind == "commit":
            dirty_blocks.step_ended()
            full = {block for block, tokens in fill.items() if tokens == 3}
            assert set(dirty_blocks.full()) == full
            away.set(dirty_blocks.full())
            gone = full
            continue
        if kind == "forget":
            dirty_blocks.forget()
            fill = dict.fromkeys(fill, 0)
            continue
        if kind == "load":
            dirty_blocks.mark_loaded(blocks)
            fill |= dict.fromkeys(blocks, 3)
        else:
            # Tokens are added to a block that is not full; a full one has another owner.
            fill |= {b: min(3, fill[b] + n) if fill[b] < 3 else n for b, n in changes}
            written = blocks, [block for block in blocks if fill[block] == 3]
            if is_on_gpu:
                dirty_blocks.mark_later(functools.partial(tuple, written))
            else:
                dirty_blocks.mark(*written)
        assert sorted(home) == sorted(gone & set(blocks))
        gone -= set(blocks)
        assert set(away.ids()) == gone
        assert len(away) == len(gone)
        dirty_blocks.step_ended()


def test_what_is_being_copied_does_not_come_home() -> None:
    away = RemoteBlocks(4)
    away.set([1, 2])
    began, order = threading.Event(), []

    def engine() -> None:
        began.set()
        away.mark_local([2, 3])
        order.append("written")

    thread = threading.Thread(target=engine)
    with away.holding([0, 2]) as blocks:
        thread.start()
        began.wait()
        assert blocks == [2]
        order.append("copied")
        assert away.ids() == [1, 2]
    thread.join()
    assert order == ["copied", "written"]
    assert away.ids() == [1]


# ---- what is asked for


@pytest.mark.parametrize("modules", [Context(5, 5), Context(-1, 2), Context(28, 31)])
def test_layers_that_are_not_there_are_refused(modules: Context) -> None:
    with pytest.raises(MigrationError, match=r"older blocks .* within 0:30"):
        modules.check(ModelGeometry(30, 3))


def test_planning() -> None:
    shape, mine = ModelGeometry(30, 3), RemoteUnit("m1.0", Context(5, 10), "p0")
    assert plan_move(Context(0, 30), "p0", shape, [], {}) == [UnitMove(Context(0, 30))]
    assert plan_move(Context(3, 12), "p0", shape, [mine], {}) == [
        UnitMove(Context(3, 5)),
        UnitMove(Context(10, 12)),
    ]
    assert plan_move(Context(5, 10), "p1", shape, [mine], {}) == [UnitMove(Context(5, 10), "m1.0")]
    with pytest.raises(MigrationError, match="return them before you move layers 7:8"):
        plan_move(LayerRange(7, 8), "p1", shape, [mine], {})
    with pytest.raises(MigrationError, match="return them before"):
        plan_move(HeadSet({7: (1,)}), "p1", shape, [mine], {})
    assert plan_return(LayerRange(5, 10), shape, [mine], {}) == [UnitMove(Context(5, 10), "m1.0")]
    with pytest.raises(MigrationError, match="return all of it"):
        plan_return(HeadSet({7: (0, 1, 2)}), shape, [mine], {})


@pytest.mark.parametrize(
    ("impl", "layer", "why"),
    [
        ({}, {}, None),
        ({"sliding_window": (-1, -1)}, {}, None),
        ({"sliding_window": 4096}, {}, "sliding window"),
        ({"sliding_window": (4095, 0)}, {}, "sliding window"),
        ({"logits_soft_cap": 30.0}, {}, "a cap"),
        ({"alibi_slopes": [0.5]}, {}, "ALiBi"),
        ({"sinks": [0.5]}, {}, "attention sinks"),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, "scaled KV"),
        ({}, {"head_size": 72}, "heads of size 72"),
        ({}, {"attn_backend": SimpleNamespace(get_name=lambda: "TRITON_ATTN")}, None),
        ({}, {"attn_backend": SimpleNamespace(get_name=lambda: "FLASHINFER")}, "plans one batch"),
    ],
)
def test_attention_that_looks_at_more_than_keys_is_refused(
    impl: dict[str, Any], layer: dict[str, Any], why: str | None
) -> None:
    plain = {"sliding_window": -1, "logits_soft_cap": 0, "alibi_slopes": None, "sinks": None}
    attention = SimpleNamespace(
        **{"head_size": 64, "kv_cache_dtype": "auto", **layer},
        impl=SimpleNamespace(**{**plain, **impl}),
    )
    if why is None:
        Context(3, 4).check_attention(attention, "l3")
        return
    with pytest.raises(MigrationError, match=why):
        Context(3, 4).check_attention(attention, "l3")
