"""The cluster as policies see it, put together from reports, placements and steps under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from banaserve.base.types import (
    Influence,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Module,
    ModulePlacement,
    MoveModule,
    Role,
    Step,
)
from banaserve.orchestrator.control import cluster_view
from banaserve.orchestrator.control.cluster_view import Known
from banaserve.orchestrator.control.projection import slabs

P0, D0 = InstanceId("p0"), InstanceId("d0")
FACTS = InstanceFacts(
    num_layers=30,
    num_kv_heads=3,
    layer_weight_bytes=1000,
    layer_token_bytes=1536,
    block_tokens=16,
    memory_bytes=10**9,
    kv_bytes=300 * 16 * 1536 * 30,
    max_kv_blocks=600,
)
AWAY = ModulePlacement(Module(10, 20), D0, P0, epoch=2, since_s=7.0, guest_bytes=500)
REPORT = InstanceReport(2, 1, 0.5, 0.25, at_s=9.0)


def seen(name: InstanceId, role: Role, **fields: object) -> InstanceView:
    return replace(InstanceView(name, role, True, REPORT, 3, 0, 100.0), **fields)


def test_facts_blocks_and_weights_come_from_what_is_known():
    views = [seen(P0, Role.PREFILL, changed_s=1.0), seen(D0, Role.DECODE, placements=(AWAY,))]
    known = {D0: Known(FACTS, 450), P0: Known(None)}
    cluster = cluster_view.cluster_view(10.0, views, known, is_balancing=True)
    p0, d0 = cluster.instances[P0], cluster.instances[D0]
    assert d0.report is not None
    assert (d0.facts, d0.report.num_kv_blocks, d0.report.weight_bytes) == (FACTS, 450, 20_000)
    assert (p0.facts, p0.report) == (None, REPORT)
    assert (cluster.now_s, cluster.is_balancing) == (10.0, True)
    # The guest has changed when the module came, whatever it says of itself.
    assert (p0.changed_s, d0.changed_s) == (7.0, None)


def test_an_instance_that_has_never_reported_stays_visible():
    cluster = cluster_view.cluster_view(
        1.0, [seen(D0, Role.DECODE, report=None)], {D0: Known(FACTS, 300)}
    )
    assert cluster.instances[D0].report is None
    assert cluster.instances[D0].facts is FACTS


def test_a_step_that_shows_its_result_keeps_busy_and_changes_no_load():
    step = Step(MoveModule(D0, P0, AWAY.module, 5), ((P0, Influence(compute=0.3)),), 1.0, 2.0, 9.0)
    other = replace(step, action=replace(step.action, module=Module(0, 5)))
    views = [seen(P0, Role.PREFILL), seen(D0, Role.DECODE, placements=(AWAY,))]
    cluster = cluster_view.cluster_view(10.0, views, {}, [step, other])
    assert [one.influence for one in cluster.under_way] == [(), other.influence]
    assert cluster.under_way[0].action == step.action


@pytest.mark.parametrize(
    ("guest_bytes", "busy", "expected"), [(0, 0.9, 0.25), (10, 0.5, 0.75), (10, 0.9, 1.0)]
)
def test_guests_take_time_and_memory_of_their_instance(guest_bytes, busy, expected):
    report = cluster_view.with_guests(REPORT, guest_bytes, busy)
    assert report is not None
    assert (report.busy_fraction, report.guest_bytes) == (expected, guest_bytes)
    assert cluster_view.with_guests(None, guest_bytes, busy) is None


def test_blocks_of_a_pool_that_is_set_apart():
    """Only KV that leaves makes blocks; neither weights nor guests change their number."""
    assert slabs.blocks(FACTS, [], 0) == slabs.blocks(FACTS, [], 10**12) == 300
    assert slabs.blocks(FACTS, [AWAY.module], 0) == 450
    assert slabs.blocks(FACTS, [Module(0, 29)], 0) == 600  # no more than its address space
    shared = replace(FACTS, kv_bytes=0, memory_bytes=FACTS.kv_bytes + 30_000, max_kv_blocks=0)
    assert slabs.blocks(shared, [], 0) == 300
    assert slabs.blocks(shared, [AWAY.module], 0) == 450
    assert slabs.blocks(shared, [], 16 * 1536 * 30) == 299
