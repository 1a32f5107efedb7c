"""What holds for the control loop on any cluster: limits, and rest under a constant load."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

import migration_clusters as clusters
from banaserve.base.types import ClusterView, InstanceFacts, Step
from banaserve.orchestrator.control.move_policies.registry import make
from banaserve.orchestrator.control.turn import ControlLimits, Mode, Remembered, turn
from depth import num_examples

NUM_BLOCKS, INTERVAL_S = 400, 2.0
APART = InstanceFacts(
    num_layers=30,
    num_kv_heads=3,
    layer_weight_bytes=14_000_000,
    layer_token_bytes=1536,
    block_tokens=16,
    memory_bytes=10**9,
    hidden_bytes=2304,
    kv_bytes=NUM_BLOCKS * 16 * 1536 * 30,
    max_kv_blocks=2 * NUM_BLOCKS,
)
POLICY = make("repaired", rho=0.0, delta_up=0.05, delta_down=0.02, link_bytes_per_s=1e9)
share = st.floats(0, 1)
views = st.lists(st.tuples(share, share), min_size=2, max_size=6).map(
    lambda loads: clusters.cluster(
        *(
            clusters.instance(f"{'pd'[i % 2]}{i // 2}", compute, memory, facts=APART)
            for i, (compute, memory) in enumerate(loads)
        )
    )
)
limits = st.builds(ControlLimits, concurrent=st.integers(1, 4), per_minute=st.integers(1, 6))


def fresh(view: ClusterView, now_s: float) -> ClusterView:
    instances = {
        name: replace(one, report=replace(one.report, at_s=now_s))
        for name, one in view.instances.items()
        if one.report is not None
    }
    return replace(view, now_s=now_s, instances=instances)


@given(views, limits)
@settings(max_examples=num_examples(60))
def test_no_limit_is_ever_exceeded(view: ClusterView, chosen: ControlLimits) -> None:
    """Nothing ends here, so that limits count; and every turn says the same of the same."""
    before = Remembered()
    under_way: list[Step] = []
    begun_s: list[float] = []
    for number in range(8):
        seen = replace(fresh(view, 100.0 + INTERVAL_S * number), under_way=tuple(under_way))
        found = turn(seen, POLICY, Mode.ON, False, chosen, before)
        assert found == turn(seen, POLICY, Mode.ON, False, chosen, before)
        assert (*found.begin, *(step for step, _ in found.held)) == found.plan.steps
        under_way += found.begin
        begun_s += [seen.now_s] * len(found.begin)
        assert len(under_way) <= chosen.concurrent
        assert len(begun_s) <= chosen.per_minute
        before = found.after
        for mode, is_paused in ((Mode.DRY_RUN, False), (Mode.ON, True)):
            assert turn(seen, POLICY, mode, is_paused, chosen, before).begin == ()


@given(views)
@settings(max_examples=num_examples(40))
def test_a_constant_load_comes_to_rest(view: ClusterView) -> None:
    """Steps end at once and do what was predicted; after two minutes nothing moves any more."""
    before, last_s = Remembered(), 0.0
    now_s = 100.0
    while now_s < 400.0:
        found = turn(
            fresh(view, now_s), POLICY, Mode.ON, False, ControlLimits(per_minute=60), before
        )
        if found.begin:
            last_s = now_s
            view = clusters.settled(view, found.begin, now_s)
        before = found.after
        now_s += INTERVAL_S
    assert last_s < 300.0
