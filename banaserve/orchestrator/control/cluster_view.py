"""View of the cluster for a migration policy, from reports and known facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Step,
)


@dataclass(frozen=True, slots=True)
class Known:
    """Facts that the executor of migrations knows of an instance, in addition to its report.

    Attributes:
        facts: Facts of the instance; None if it cannot take part in migrations.
        num_kv_blocks: Present number of KV blocks of its pool.
        overlap_fraction: Overlap as in its report; None if the instance waits for its guests, or
            the overlap has not been learnt.
    """

    facts: InstanceFacts | None
    num_kv_blocks: int = 0
    overlap_fraction: float | None = None


def with_guests(
    report: InstanceReport | None, guest_bytes: int, busy_fraction: float
) -> InstanceReport | None:
    """Return ``report`` with the memory and the time of the guests beside the instance added."""
    if report is None or not guest_bytes:
        return report
    busy = min(1.0, report.busy_fraction + busy_fraction)
    return replace(report, busy_fraction=busy, guest_bytes=guest_bytes)


def cluster_view(
    now_s: float,
    views: Iterable[InstanceView],
    known: Mapping[InstanceId, Known],
    under_way: Sequence[Step] = (),
    is_balancing: bool = False,
) -> ClusterView:
    """Return the cluster as a migration policy needs it.

    A step under way whose result is visible, but which is still releasing memory, keeps its
    instances busy and no longer influences any load.
    """
    instances = {view.id: view for view in views}
    arrived_s = _arrivals(instances.values())
    completed = {
        name: _completed(view, known.get(name), arrived_s.get(name))
        for name, view in instances.items()
    }
    cluster = ClusterView(now_s, completed, is_balancing=is_balancing)
    steps = tuple(
        replace(step, influence=()) if step.is_finished(cluster) else step for step in under_way
    )
    return replace(cluster, under_way=steps)


def _arrivals(views: Iterable[InstanceView]) -> dict[InstanceId, float]:
    """Return the time at which the last guest module arrived, for each instance that has guests."""
    last: dict[InstanceId, float] = {}
    for view in views:
        for placement in view.placements:
            before = last.get(placement.guest, placement.since_s)
            last[placement.guest] = max(before, placement.since_s)
    return last


def _completed(view: InstanceView, known: Known | None, arrived_s: float | None) -> InstanceView:
    changed_s = max(
        (at_s for at_s in (view.changed_s, arrived_s) if at_s is not None), default=None
    )
    if known is None or known.facts is None:
        return replace(view, changed_s=changed_s)
    facts, report = known.facts, view.report
    if report is not None:
        away = sum(p.module.num_layers for p in view.placements if not p.module.heads)
        weight_bytes = (facts.num_layers - away) * facts.layer_weight_bytes
        report = replace(
            report,
            num_kv_blocks=known.num_kv_blocks,
            weight_bytes=weight_bytes,
            overlap_fraction=known.overlap_fraction,
        )
    return replace(view, facts=facts, report=report, changed_s=changed_s)
