"""Clusters for tests of migration policies, and what a plan's influence makes of one."""

from __future__ import annotations

from dataclasses import replace

from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    ModulePlacement,
    MoveModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.projection import slabs

WEIGHT_BYTES = 629_278_720
FIXED_BYTES = 540_000_000
OPT_13B = InstanceFacts(
    num_layers=40,
    num_kv_heads=40,
    layer_weight_bytes=WEIGHT_BYTES,
    layer_token_bytes=20480,
    block_tokens=16,
    memory_bytes=40 * WEIGHT_BYTES + FIXED_BYTES + 4134 * 16 * 819_200,
    fixed_bytes=FIXED_BYTES,
    hidden_bytes=10_240,
)
"""OPT-13B on an A100-80G with DistServe's 66,144 tokens of KV cache."""

TOKENS_PER_S = 1e9
"""So fast that whole tokens of waiting work round nothing away."""


def instance(
    name: str,
    compute: float,
    memory: float,
    *,
    now_s: float = 100.0,
    facts: InstanceFacts | None = OPT_13B,
    waiting_s: float = 0.0,
    step_s: float = 0.03,
    changed_s: float | None = None,
    running: int = 48,
    waiting: int = 0,
) -> InstanceView:
    """One whose first letter is its role, with a fresh report."""
    role = {"p": Role.PREFILL, "d": Role.DECODE, "c": Role.COLOCATED}[name[0]]
    report = InstanceReport(running, waiting, memory, compute, now_s, step_s=step_s)
    tokens = round(waiting_s * TOKENS_PER_S)
    return InstanceView(
        InstanceId(name),
        role,
        True,
        report,
        running + waiting,
        tokens,
        TOKENS_PER_S,
        facts,
        changed_s=changed_s,
    )


def cluster(*views: InstanceView, now_s: float = 100.0, **others: object) -> ClusterView:
    return replace(ClusterView(now_s, {view.id: view for view in views}), **others)  # type: ignore[arg-type]


def settled(view: ClusterView, steps: tuple[Step, ...], now_s: float) -> ClusterView:
    """Returns ``view`` at ``now_s`` with all steps done and the load otherwise as it was."""
    instances = dict(view.instances)
    for step in steps:
        before = dict(instances)
        for name, felt in step.influence:
            old = before[name]
            assert old.report is not None
            report = replace(
                old.report,
                busy_fraction=max(0.0, old.report.busy_fraction + felt.compute),
                kv_used_fraction=max(0.0, old.report.kv_used_fraction + felt.memory),
                guest_bytes=max(0, old.report.guest_bytes + felt.guest_bytes),
                step_s=max(0.0, old.report.step_s + felt.step_s),
            )
            tokens = old.inflight_prefill_tokens + round(felt.waiting_s * TOKENS_PER_S)
            instances[name] = replace(old, report=report, inflight_prefill_tokens=max(0, tokens))
        for name in step.instances:
            instances[name] = replace(instances[name], changed_s=now_s)
        _place(instances, step, now_s)
        for name in step.instances:
            _rescale(instances, before, name)
    fresh = {
        name: replace(old, report=replace(old.report, at_s=now_s)) if old.report else old
        for name, old in instances.items()
    }
    return replace(view, now_s=now_s, instances=fresh)


def _place(instances: dict[InstanceId, InstanceView], step: Step, now_s: float) -> None:
    action = step.action
    if isinstance(action, SwitchRole):
        old = instances[action.instance]
        instances[action.instance] = replace(old, role=action.role)
        return
    host = instances[action.host]
    if isinstance(action, MoveModule):
        held = dict(step.influence)[action.guest].guest_bytes
        new = ModulePlacement(
            action.module, action.host, action.guest, host.epoch + 1, now_s, guest_bytes=held
        )
        placements = (*host.placements, new)
    else:
        placements = tuple(p for p in host.placements if p.module != action.module)
    instances[action.host] = replace(host, placements=placements, epoch=host.epoch + 1)


def blocks_of(view: InstanceView) -> int:
    """KV blocks of an instance that does not report them: from its placements and guests."""
    assert view.facts is not None
    assert view.report is not None
    away = [placement.module for placement in view.placements]
    return max(1, slabs.blocks(view.facts, away, view.report.guest_bytes))


def _rescale(
    instances: dict[InstanceId, InstanceView],
    before: dict[InstanceId, InstanceView],
    name: InstanceId,
) -> None:
    """The KV in use stays what it is while the number of blocks changes."""
    new = instances[name]
    assert new.report is not None
    ratio = blocks_of(before[name]) / blocks_of(new)
    report = replace(new.report, kv_used_fraction=new.report.kv_used_fraction * ratio)
    instances[name] = replace(new, report=report)
