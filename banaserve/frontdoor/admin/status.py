"""Status of a running server, composed from values at hand: no engine is asked."""

from __future__ import annotations

from typing import Any

from banaserve.base.types import ClusterView, InstanceView
from banaserve.contracts.control_api import ControllerStatus, InstanceStatus, MoveLine, ServerStatus
from banaserve.contracts.migration_api import Migration
from banaserve.contracts.restart_api import RollingRestart
from banaserve.orchestrator.control.measure import judge, load_of
from banaserve.orchestrator.control.move_policies.scoring import module_words
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.orchestrator.planner.loop.decision_format import pressure_words
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.operation_base import Operations, OperationState
from banaserve.serving.operations.executor import seconds_of
from banaserve.serving.operations.node_changes import NodeChanges
from banaserve.serving.operations.roles import Roles
from banaserve.serving.operations.rolling_restart import RollingRestarts
from banaserve.serving.operations.scaler import Scaler

_ENDED_SHOWN = 5


def status_of(
    view: ClusterView,
    coordinator: Coordinator,
    roles: Roles,
    scaler: Scaler,
    restarts: RollingRestarts,
    node_changes: NodeChanges | None,
    controller: ControllerStatus,
    routing: NamedPolicy,
    at_s: float,
) -> ServerStatus:
    """Return instances, operations, nodes and the controller.

    Args:
        node_changes: Changes of nodes; None leaves out nodes.
        at_s: Present time, in seconds since 1970.
    """
    left_out = judge(view).left_out
    replaced = {
        one.instance
        for restart in restarts.recent()
        if restart.is_open
        for one in restart.engines
        if one.state in ("draining", "starting")
    }
    instances = [
        _instance(one, view, coordinator, roles, str(left_out.get(name, "")), name in replaced)
        for name, one in view.instances.items()
    ]
    kinds: list[Operations[Any]] = [coordinator, roles, scaler, restarts]
    if node_changes is not None:
        kinds.append(node_changes)
    operations: list[OperationState] = [one for kind in kinds for one in kind.recent()]
    ended = [one for one in operations if not one.is_open]
    shown = [one for one in operations if one.is_open] + ended[-_ENDED_SHOWN:]
    return ServerStatus(
        at_s,
        instances,
        [_line(one) for one in shown],
        controller,
        routing.name,
        routing.package,
        node_changes.nodes() if node_changes is not None else [],
        pressure_words(view.back_pressure),
    )


def _line(one: OperationState) -> MoveLine:
    seconds = seconds_of(one) if isinstance(one, Migration) else one.seconds
    what = f"rolling restart: {one}" if isinstance(one, RollingRestart) else str(one)
    return MoveLine(one.id, what, one.state, seconds, one.reason)


def _instance(
    one: InstanceView,
    view: ClusterView,
    coordinator: Coordinator,
    roles: Roles,
    left_out: str,
    is_replaced: bool,
) -> InstanceStatus:
    report, host_state = one.report, coordinator.hosts[one.id]
    load = load_of(report) if report is not None else None
    guests = [
        f"{module_words(p.module)} of {host.id}"
        for host in view.instances.values()
        for p in host.placements
        if p.guest == one.id
    ]
    return InstanceStatus(
        id=one.id,
        role=one.role.value,
        state="restarting" if is_replaced else _state(one, coordinator, roles),
        inflight_requests=one.inflight_requests,
        inflight_prefill_tokens=one.inflight_prefill_tokens,
        compute=load.compute if load else None,
        memory=load.memory if load else None,
        num_running=report.num_running if report else 0,
        num_waiting=report.num_waiting if report else 0,
        step_s=report.step_s if report else 0.0,
        step_tokens=report.step_tokens if report else 0.0,
        age_s=one.report_age_s(view.now_s),
        kv_blocks=report.num_kv_blocks if report else 0,
        kv_blocks_gained=host_state.grown_blocks,
        guest_bytes=report.guest_bytes if report else 0,
        epoch=one.epoch,
        away=[f"{module_words(p.module)} at {p.guest}" for p in one.placements],
        guests=guests,
        left_out=left_out,
        gpu_busy_fraction=report.gpu_busy_fraction if report else None,
        gpu_memory_fraction=report.gpu_memory_fraction if report else None,
        node=host_state.instance.place.node,
    )


def _state(one: InstanceView, coordinator: Coordinator, roles: Roles) -> str:
    if any(change.is_open and change.instance == one.id for change in roles.recent()):
        return "draining"
    instance = coordinator.hosts[one.id].instance
    if instance.service.is_drained:
        return "drained"
    if instance.is_ready:
        return "ready"
    return "down" if instance.place.is_there else "away"
